//! The symlink `latest` in a checkpoint folder, which points to the newest complete checkpoint.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::plan::Tag;

const LATEST: &str = "latest";

/// Atomically points `latest` to the complete checkpoint `dir` in the same folder.
///
/// On a file system without symlinks this only warns: the program itself does not use the link.
pub(super) fn update_latest_link(dir: &Path) {
    if let Err(error) = replace(dir) {
        tracing::warn!("failed to point the link {LATEST} to {}: {error}", dir.display());
    }
}

/// Removes the link of a folder if the checkpoint that it points to was moved away.
pub(super) fn remove_dangling_link(output_dir: &Path) -> io::Result<()> {
    let link = output_dir.join(LATEST);
    let is_stale = fs::symlink_metadata(&link).is_ok_and(|found| found.is_symlink()) && !link.exists();
    if is_stale { fs::remove_file(link) } else { Ok(()) }
}

fn replace(dir: &Path) -> io::Result<()> {
    let parent = dir.parent().unwrap_or(Path::new("."));
    let link = parent.join(LATEST);
    if fs::symlink_metadata(&link).is_ok_and(|found| !found.is_symlink()) {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("{} is not a symlink", link.display())));
    }
    let temporary = parent.join(format!(".{LATEST}.tmp"));
    if fs::symlink_metadata(&temporary).is_ok_and(|found| found.is_symlink()) {
        fs::remove_file(&temporary)?;
    }
    symlink(Tag::name_of(dir), &temporary)?;
    fs::rename(&temporary, link).inspect_err(|_| drop(fs::remove_file(&temporary)))
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
            update_latest_link(&folder.join(name));
            assert_eq!(fs::read_link(folder.join(LATEST)).unwrap(), Path::new(name));
        }
        fs::rename(&folder, root.path().join("moved")).unwrap();
        assert!(root.path().join("moved/latest").is_dir());
    }

    #[test]
    fn an_existing_file_or_folder_named_latest_is_kept() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("latest/mine")).unwrap();
        update_latest_link(&root.path().join("global_step_5"));
        assert!(root.path().join("latest/mine").is_dir());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
        fs::remove_dir_all(root.path().join("latest")).unwrap();
        fs::write(root.path().join("latest"), "mine").unwrap();
        update_latest_link(&root.path().join("global_step_5"));
        fs::remove_file(root.path().join("latest")).unwrap();
        fs::write(root.path().join(".latest.tmp"), "mine").unwrap();
        update_latest_link(&root.path().join("global_step_5"));
        fs::rename(root.path().join(".latest.tmp"), root.path().join("latest")).unwrap();
        assert_eq!(fs::read_to_string(root.path().join("latest")).unwrap(), "mine");
    }

    #[test]
    fn a_dangling_link_is_removed() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("global_step_5")).unwrap();
        update_latest_link(&root.path().join("global_step_5"));
        remove_dangling_link(root.path()).unwrap();
        assert!(root.path().join("latest").is_dir());
        fs::remove_dir(root.path().join("global_step_5")).unwrap();
        remove_dangling_link(root.path()).unwrap();
        assert!(fs::symlink_metadata(root.path().join("latest")).is_err());
    }
}
