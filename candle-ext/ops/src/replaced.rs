//! Replacement of built-in CUDA kernels by `OP.fatbin` files in a folder, as scripts/build-kernels creates it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use candle_core::{Result, bail};

static FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// Replaces the CUDA kernels of each op that has an `OP.fatbin` in `folder`. Call it before any computation.
///
/// # Errors
///
/// If `folder` is not a folder.
pub fn replace_kernels(folder: &Path) -> Result<()> {
    if !folder.is_dir() {
        bail!("replace kernels: {} is no folder; scripts/build-kernels makes one", folder.display())
    }
    if FOLDER.set(folder.to_owned()).is_ok() {
        tracing::warn!("kernels in {} replace those of this program", folder.display());
    }
    Ok(())
}

/// Returns the fatbin that replaces an op's kernels, if there is one.
#[cfg(feature = "cuda")]
pub(crate) fn fatbin(op: &str) -> Result<Option<Vec<u8>>> {
    FOLDER.get().map_or(Ok(None), |folder| fatbin_in(folder, op))
}

#[cfg(any(feature = "cuda", test))]
fn fatbin_in(folder: &Path, op: &str) -> Result<Option<Vec<u8>>> {
    let path = folder.join(op).with_extension("fatbin");
    match std::fs::read(&path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => bail!("{op}: read {}: {error}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_folder_replaces_the_ops_that_it_has() {
        let folder = std::env::temp_dir().join(format!("candlewick-kernels-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a temporary folder can be made");
        fs::write(folder.join("add.fatbin"), b"compiled").expect("it can be written to");
        let found = ["add", "rope"].map(|op| fatbin_in(&folder, op).ok());
        fs::remove_dir_all(&folder).expect("it can be removed");
        assert_eq!(found, [Some(Some(b"compiled".to_vec())), Some(None)]);
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        let error = replace_kernels(Path::new("/no/such/folder")).expect_err("it is not there").to_string();
        assert!(error.contains("/no/such/folder is no folder; scripts/build-kernels"), "{error}");
    }
}
