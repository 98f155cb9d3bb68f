//! Hook engines: they build the way into a replacement and the way back to the original, and patch nothing.
//!
//! The host writes the patches, with all threads stopped. An engine must not know what is hooked or why. It runs in the
//! control thread of a foreign process: it may allocate, never prints, and reports everything that it cannot do.

pub mod builtin;
#[cfg(feature = "frida")]
pub mod frida;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub(crate) mod near;
mod plan;

#[cfg(test)]
mod tests;

pub use near::set_maps;

use cmt_common::control::{RELOCATED_MAX, Relocated, WINDOW_MAX};
use iced_x86::Mnemonic;

/// A function to hook.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// Address of its first byte.
    pub address: u64,
    /// Bytes of it; 0 if unknown.
    pub size: u64,
}

/// What the host needs to commit a hook and to take it back.
#[derive(Clone)]
pub struct Prepared {
    /// Address of the first byte that the patch changes; always behind the first instruction.
    pub window: u64,
    /// The window as it is: at most [`WINDOW_MAX`] bytes of whole instructions.
    pub original: Vec<u8>,
    /// The window as it will be; as long as `original`.
    pub patched: Vec<u8>,
    /// Address of the original function for the replacement to call.
    pub trampoline: u64,
    /// The window's instructions from the first on and where their copies stand; at most [`RELOCATED_MAX`]. It may end
    /// early: threads that stand behind its end have to be waited for.
    pub relocated: Vec<Relocated>,
}

// A window is refused once it passes WINDOW_MAX, and it ends with the instruction that covers its fifth byte.
const _: () = assert!(RELOCATED_MAX >= plan::JUMP_BYTES && WINDOW_MAX >= plan::JUMP_BYTES);

/// Builds trampolines and thunks.
pub trait HookEngine {
    /// The engine's name, as `cmt attach` reports it.
    fn name(&self) -> &'static str;

    /// Builds the trampoline and the thunk of one function. Patches nothing; a refusal leaves nothing behind.
    fn prepare(&mut self, function: Function, replacement: u64) -> Result<Prepared, HookError>;

    /// Makes everything that was prepared so far executable and takes the right to write it away.
    fn seal(&mut self) -> Result<(), HookError>;
}

/// The engine of this build: frida's where it is built in, else the built-in one.
pub fn engine() -> Box<dyn HookEngine> {
    #[cfg(feature = "frida")]
    return Box::new(frida::Frida::default());
    #[cfg(not(feature = "frida"))]
    Box::new(builtin::Builtin::default())
}

/// Why a function cannot be hooked. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The address is not in a readable and executable mapping.
    #[error("{address:#x} is not in readable code")]
    NotCode {
        /// The function's address.
        address: u64,
    },
    /// The first instruction stays in place, so the thunk has to undo it, and this one it cannot undo.
    #[error("starts with {mnemonic:?}, which a thunk cannot undo")]
    FirstInstruction {
        /// The instruction at the start, or the one behind `endbr64`.
        mnemonic: Mnemonic,
    },
    /// A breakpoint hides an instruction.
    #[error("a breakpoint at +{offset} hides an instruction")]
    Breakpoint {
        /// Bytes from the function's start.
        offset: u64,
    },
    /// The window would reach behind the function's end.
    #[error("is {size} bytes long, too short: the patch ends at +{needed}")]
    TooShort {
        /// Bytes of the function.
        size: u64,
        /// Bytes that it would need to have.
        needed: u64,
    },
    /// The window holds an instruction that leaves it.
    #[error("{mnemonic:?} at +{offset} stands where the patch would")]
    ControlFlow {
        /// The instruction.
        mnemonic: Mnemonic,
        /// Bytes from the function's start.
        offset: u64,
    },
    /// The last instruction of the window is too long.
    #[error("the patch would replace {bytes} bytes")]
    WindowTooLong {
        /// Length of the window in bytes.
        bytes: usize,
    },
    /// The function jumps back into the window.
    #[error("the branch at +{offset} leads to where the patch would stand")]
    BranchIntoWindow {
        /// Bytes from the function's start to the branch.
        offset: u64,
    },
    /// An instruction of the window cannot be moved, for instance since its operand would be out of reach.
    #[error("cannot be moved: {reason}")]
    NotRelocatable {
        /// What the encoder said.
        reason: String,
    },
    /// No free memory within reach of a 32-bit displacement.
    #[error("no free memory within 2 GiB of {address:#x}")]
    NoRoom {
        /// The function's address.
        address: u64,
    },
    /// A system call failed.
    #[error("{call} failed")]
    System {
        /// Its name.
        call: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}
