//! The payload as a file, and the library that is preloaded to load it, kept for processes that outlive this one.

use std::fs::{self, Permissions};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::bail;
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::Uid;

use crate::injector::PAYLOAD;

/// Built from `cmt-inject/src/launch/preload.s`.
static PRELOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/preload.so"));

/// Where both stand.
pub struct Files {
    /// What the loader is to preload.
    pub preload: PathBuf,
    /// What that loads.
    pub payload: PathBuf,
}

/// Writes what is not there yet.
///
/// # Errors
/// When there is no folder to which it can be written and from which code may be mapped.
pub fn place() -> anyhow::Result<Files> {
    let mut reasons = String::new();
    for folder in folders() {
        let placed = place_in(&folder, "cmt-payload", PAYLOAD).and_then(|payload| {
            let preload = place_in(&folder, "cmt-preload", PRELOAD)?;
            Ok(Files { preload, payload })
        });
        match placed {
            Ok(files) => return Ok(files),
            Err(error) => reasons += &format!("\n  {}: {error}", folder.display()),
        }
    }
    bail!(
        "there is no place for the library that is loaded into the program, which was not started; XDG_CACHE_HOME may name \
         one:{reasons}"
    )
}

/// Root's programs may go on as another user, who must be able to read it, too.
fn folders() -> Vec<PathBuf> {
    let variable = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|it| it.is_absolute())
    };
    let cache = variable("XDG_CACHE_HOME").or_else(|| match Uid::effective().is_root() {
        true => Some(PathBuf::from("/var/cache")),
        false => Some(variable("HOME")?.join(".cache")),
    });
    let shared = format!("cmt-{}", Uid::effective());
    let mut folders: Vec<PathBuf> = cache.into_iter().map(|cache| cache.join("cmt")).collect();
    folders.extend(["/var/tmp", "/tmp"].map(|folder| Path::new(folder).join(&shared)));
    folders
}

fn place_in(folder: &Path, name: &str, library: &[u8]) -> io::Result<PathBuf> {
    let folder = &make(folder)?;
    let refuse = |why: &str| Err(io::Error::other(why.to_owned()));
    // The loader splits LD_PRELOAD at both.
    let path = folder.as_os_str().as_bytes();
    if path.iter().any(|byte| b": ".contains(byte)) {
        return refuse("a colon or a blank in the name");
    }
    let owner = fs::symlink_metadata(folder)?;
    if owner.uid() != Uid::effective().as_raw() || owner.mode() & 0o022 != 0 {
        return refuse("it is not ours alone");
    }
    if statvfs(folder)?.flags().contains(FsFlags::ST_NOEXEC) {
        return refuse("mounted noexec");
    }
    let mut hasher = DefaultHasher::new();
    library.hash(&mut hasher);
    let path = folder.join(format!("{name}-{:016x}.so", hasher.finish()));
    if fs::read(&path).is_ok_and(|there| there == library) {
        return Ok(path);
    }
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(library)?;
    file.as_file()
        .set_permissions(Permissions::from_mode(0o755))?;
    file.persist(&path)?;
    Ok(path)
}

/// The folder's real path. It is made if it is not there, and all above it, where nobody else may put others in their place.
fn make(folder: &Path) -> io::Result<PathBuf> {
    if let Ok(path) = folder.canonicalize() {
        check_above(&path)?;
        return Ok(path);
    }
    let (Some(parent), Some(name)) = (folder.parent(), folder.file_name()) else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let path = make(parent)?.join(name);
    // Whatever the umask: root's programs may go on as another user.
    fs::DirBuilder::new().mode(0o755).create(&path)?;
    fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    Ok(path)
}

/// Refuses a path that others may change: they could have programs load what they like.
fn check_above(path: &Path) -> io::Result<()> {
    let (root, ours) = (0, Uid::effective().as_raw());
    let known = [Some(root), Some(ours), roots_alias()];
    for above in path.ancestors() {
        let found = fs::symlink_metadata(above)?;
        let others_may_write = found.mode() & 0o022 != 0 && found.mode() & 0o1000 == 0;
        if !known.contains(&Some(found.uid())) || others_may_write {
            let why = format!("others may write to {}", above.display());
            return Err(io::Error::other(why));
        }
    }
    Ok(())
}

/// Who the root of the machine seems to be in a user namespace that does not know him: nobody, as all others there.
fn roots_alias() -> Option<u32> {
    let knows_all = fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| {
        let fields: Vec<&str> = map.split_ascii_whitespace().collect();
        fields == ["0", "0", "4294967295"]
    });
    if knows_all {
        return None;
    }
    let nobody = fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?;
    nobody.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_written_once_and_mended_when_damaged() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = place_in(folder.path(), "it", b"library").expect("placed");
        let inode = |path: &Path| fs::metadata(path).expect("there").ino();
        let first = inode(&path);
        assert_eq!(
            place_in(folder.path(), "it", b"library").expect("again"),
            path
        );
        assert_eq!(inode(&path), first);
        fs::write(&path, "damaged").expect("written");
        place_in(folder.path(), "it", b"library").expect("mended");
        assert!(fs::read(&path).expect("read") == b"library");
        assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 1);
    }

    #[test]
    fn where_others_may_write_or_the_loader_would_stumble_it_is_not_placed() {
        let folder = tempfile::tempdir().expect("a folder");
        let blank = folder.path().join("a b");
        assert!(place_in(&blank, "it", b"").is_err());
        let open = folder.path().join("open");
        fs::create_dir(&open).expect("a folder");
        fs::set_permissions(&open, Permissions::from_mode(0o777)).expect("opened");
        assert!(place_in(&open, "it", b"").is_err());
    }
}
