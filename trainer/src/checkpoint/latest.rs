//! The link `latest`, beside the checkpoints of a folder, to the one that was finished last.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::plan::Tag;

const LATEST: &str = "latest";

/// Points `latest` to the finished checkpoint `dir`, beside it. A reader finds the old target or the new one.
///
/// A file system without links costs a warning only: nothing that this program does needs the link.
pub fn link_latest(dir: &Path) {
    if let Err(error) = replace(dir) {
        tracing::warn!("failed to point the link {LATEST} to {}: {error}", dir.display());
    }
}

fn replace(dir: &Path) -> io::Result<()> {
    let parent = dir.parent().unwrap_or(Path::new("."));
    let temporary = parent.join(format!(".{LATEST}.tmp"));
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    symlink(Tag::name_of(dir), &temporary)?;
    fs::rename(&temporary, parent.join(LATEST)).inspect_err(|_| drop(fs::remove_file(&temporary)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_link_follows_the_newest_and_survives_a_move() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("model");
        for name in ["global_step_5", "global_step_10"] {
            fs::create_dir_all(folder.join(name)).unwrap();
            link_latest(&folder.join(name));
            assert_eq!(fs::read_link(folder.join(LATEST)).unwrap(), Path::new(name));
        }
        fs::rename(&folder, root.path().join("moved")).unwrap();
        assert!(root.path().join("moved/latest").is_dir());
    }

    #[test]
    fn a_folder_of_that_name_is_left_alone() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("latest/mine")).unwrap();
        link_latest(&root.path().join("global_step_5"));
        assert!(root.path().join("latest/mine").is_dir());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }
}
