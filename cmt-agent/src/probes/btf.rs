//! The kernel's description of its own types (BTF): where a member stands in a structure.
//!
//! Reads as much of the format as that takes (`Documentation/bpf/btf.rst`). The file is the kernel's, but a wrong figure
//! from it would have the programs read nonsense: whatever is not as expected is an error.

use std::fs;
use std::path::Path;

const MAGIC: u16 = 0xeb9f;

const KIND_INT: u32 = 1;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
const KIND_TYPEDEF: u32 = 8;
const KIND_VOLATILE: u32 = 9;
const KIND_CONST: u32 = 10;
const KIND_RESTRICT: u32 = 11;
const KIND_FUNC_PROTO: u32 = 13;
const KIND_VAR: u32 = 14;
const KIND_DATASEC: u32 = 15;
const KIND_DECL_TAG: u32 = 17;
const KIND_TYPE_TAG: u32 = 18;
const KIND_ENUM64: u32 = 19;

/// No type in the kernel is nested deeper without a name.
const DEEPEST: u32 = 16;

/// A kernel's types.
pub struct Btf {
    data: Vec<u8>,
    strings: usize,
    /// Offset of each type in `data`, by its id less one.
    types: Vec<usize>,
}

impl Btf {
    /// Reads a file such as `/sys/kernel/btf/vmlinux`.
    pub fn read(path: &Path) -> Result<Self, String> {
        let data = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Self::parse(data).ok_or_else(|| format!("{} is no BTF of a known kind", path.display()))
    }

    fn parse(data: Vec<u8>) -> Option<Self> {
        let mut btf = Self {
            data,
            strings: 0,
            types: Vec::new(),
        };
        if btf.word(0)? as u16 != MAGIC {
            return None;
        }
        let header = btf.word(4)? as usize;
        let at = header.checked_add(btf.word(8)? as usize)?;
        let end = at.checked_add(btf.word(12)? as usize)?;
        btf.strings = header.checked_add(btf.word(16)? as usize)?;
        let mut next = at;
        while next < end {
            btf.types.push(next);
            let (kind, count) = btf.kind(next)?;
            let behind = match kind {
                KIND_INT | KIND_VAR | KIND_DECL_TAG => 4,
                KIND_ARRAY => 12,
                KIND_STRUCT | KIND_UNION | KIND_DATASEC | KIND_ENUM64 => 12 * count,
                KIND_ENUM | KIND_FUNC_PROTO => 8 * count,
                0 | 20.. => return None,
                _ => 0,
            };
            next += 12 + behind;
        }
        Some(btf)
    }

    /// Offset in bytes of a member, such as `i_pages.xa_head` of `address_space`; names of members that have none are left
    /// out.
    pub fn offset(&self, structure: &str, member: &str) -> Option<u32> {
        let mut at = self.find(KIND_STRUCT, structure)?;
        let mut bits = 0;
        for name in member.split('.') {
            let (offset, of_type) = self.member(at, name, DEEPEST)?;
            bits += offset;
            at = self.resolve(of_type).unwrap_or(at);
        }
        (bits % 8 == 0).then_some(bits / 8)
    }

    /// Size in bytes of a structure.
    pub fn size(&self, structure: &str) -> Option<u32> {
        self.word(self.find(KIND_STRUCT, structure)? + 8)
    }

    /// The value of a constant of an enumeration.
    pub fn constant(&self, enumeration: &str, name: &str) -> Option<u32> {
        let at = self.find(KIND_ENUM, enumeration)?;
        let (_, count) = self.kind(at)?;
        let of = (0..count).find(|index| {
            self.word(at + 12 + index * 8)
                .is_some_and(|offset| self.is_called(offset, name))
        })?;
        self.word(at + 16 + of * 8)
    }

    fn find(&self, kind: u32, name: &str) -> Option<usize> {
        self.types.iter().copied().find(|&at| {
            self.kind(at)
                .is_some_and(|(found, count)| found == kind && count > 0)
                && self
                    .word(at)
                    .is_some_and(|offset| self.is_called(offset, name))
        })
    }

    /// Offset in bits and type of a member of the structure or union at `at`.
    fn member(&self, at: usize, name: &str, deepest: u32) -> Option<(u32, u32)> {
        let (kind, count) = self.kind(at)?;
        if !matches!(kind, KIND_STRUCT | KIND_UNION) || deepest == 0 {
            return None;
        }
        // Where the flag is set, the upper byte is a bit field's width.
        let mask = match self.word(at + 4)? >> 31 {
            0 => u32::MAX,
            _ => 0x00ff_ffff,
        };
        (0..count).find_map(|index| {
            let entry = at + 12 + index * 12;
            let (called, of_type) = (self.word(entry)?, self.word(entry + 4)?);
            let offset = self.word(entry + 8)? & mask;
            if self.is_called(called, name) {
                return Some((offset, of_type));
            }
            if !self.is_called(called, "") {
                return None;
            }
            let (within, of_type) = self.member(self.resolve(of_type)?, name, deepest - 1)?;
            Some((offset + within, of_type))
        })
    }

    /// The type behind names and qualifiers.
    fn resolve(&self, mut id: u32) -> Option<usize> {
        for _ in 0..DEEPEST {
            let at = *self.types.get((id as usize).checked_sub(1)?)?;
            match self.kind(at)?.0 {
                KIND_TYPEDEF | KIND_VOLATILE | KIND_CONST | KIND_RESTRICT | KIND_TYPE_TAG => {
                    id = self.word(at + 8)?;
                }
                _ => return Some(at),
            }
        }
        None
    }

    /// Kind and number of entries of the type at `at`.
    fn kind(&self, at: usize) -> Option<(u32, usize)> {
        let info = self.word(at + 4)?;
        Some((info >> 24 & 0x1f, (info & 0xffff) as usize))
    }

    fn is_called(&self, offset: u32, name: &str) -> bool {
        let start = self.strings.saturating_add(offset as usize);
        self.data
            .get(start..)
            .and_then(|rest| rest.strip_prefix(name.as_bytes()))
            .is_some_and(|rest| rest.first() == Some(&0))
    }

    fn word(&self, at: usize) -> Option<u32> {
        let bytes = self.data.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `struct outer { int a; union { long b; struct inner c; }; const struct inner d; }; enum e { X = 5 };`
    fn example() -> Vec<u8> {
        let mut strings = vec![0u8];
        let mut called = |name: &str| {
            let at = strings.len() as u32;
            strings.extend_from_slice(name.as_bytes());
            strings.push(0);
            at
        };
        let info = |kind: u32, count: u32| kind << 24 | count;
        let types: Vec<u32> = [
            // 1: int
            vec![called("int"), info(KIND_INT, 0), 4, 32],
            // 2: struct inner
            vec![called("inner"), info(KIND_STRUCT, 1), 8, called("x"), 1, 32],
            // 3: the union without a name
            vec![
                0,
                info(KIND_UNION, 2),
                8,
                called("b"),
                1,
                0,
                called("c"),
                2,
                0,
            ],
            // 4: const struct inner
            vec![0, info(KIND_CONST, 0), 2],
            // 5: struct outer
            vec![
                called("outer"),
                info(KIND_STRUCT, 3),
                24,
                called("a"),
                1,
                0,
                0,
                3,
                64,
                called("d"),
                4,
                128,
            ],
            // 6: enum e
            vec![called("e"), info(KIND_ENUM, 1), 4, called("X"), 5],
        ]
        .concat();
        let bytes: Vec<u8> = types.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut data = Vec::new();
        for word in [
            u32::from(MAGIC) | 1 << 16,
            24,
            0,
            bytes.len() as u32,
            bytes.len() as u32,
            strings.len() as u32,
        ] {
            data.extend_from_slice(&word.to_le_bytes());
        }
        data.extend_from_slice(&bytes);
        data.extend_from_slice(&strings);
        data
    }

    #[test]
    fn members_are_found_through_names_qualifiers_and_what_has_none() {
        let btf = Btf::parse(example()).expect("BTF");
        for (member, offset) in [
            ("a", Some(0)),
            ("b", Some(8)),
            ("c", Some(8)),
            ("c.x", Some(12)),
            ("d.x", Some(20)),
            ("x", None),
            ("e", None),
        ] {
            assert_eq!(btf.offset("outer", member), offset, "{member}");
        }
        assert_eq!(btf.size("outer"), Some(24));
        assert_eq!(btf.constant("e", "X"), Some(5));
        assert_eq!(btf.offset("missing", "a"), None);
    }

    #[test]
    fn a_damaged_file_is_no_btf_or_says_nothing_and_never_panics() {
        let whole = example();
        for end in 0..whole.len() {
            if let Some(btf) = Btf::parse(whole[..end].to_vec()) {
                btf.offset("outer", "d.x");
            }
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0xff;
            if let Some(btf) = Btf::parse(damaged) {
                btf.offset("outer", "d.x");
                btf.constant("e", "X");
            }
        }
    }
}
