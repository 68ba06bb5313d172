//! Names in the folder of a record: `step-000012/micro-0003.rank-000.safetensors`.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The position of a micro-batch in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MicroPosition {
    /// The step, counted from 1.
    pub(crate) step: usize,
    /// The index among the micro-batches of all ranks in the step.
    pub(crate) micro_idx: usize,
}

/// Returns the folder of a step.
pub(super) fn step_dir(dir: &Path, step: usize) -> PathBuf {
    dir.join(format!("step-{step:06}"))
}

/// Returns the name of the file that a rank writes; `*` stands for all ranks.
pub(super) fn file_name(micro_idx: usize, rank: Option<usize>) -> String {
    let rank = rank.map_or("*".to_owned(), |rank| format!("{rank:03}"));
    format!("micro-{micro_idx:04}.rank-{rank}.safetensors")
}

/// Returns the steps of a record. A missing folder has none.
pub(super) fn steps(dir: &Path) -> io::Result<BTreeSet<usize>> {
    let step = |name: &str| name.strip_prefix("step-").and_then(number);
    Ok(names(dir)?.iter().filter_map(|name| step(name)).collect())
}

/// Returns the files of a step with the indices of their micro-batches, sorted by name. A missing folder has none.
pub(super) fn files(step_dir: &Path) -> io::Result<Vec<(usize, PathBuf)>> {
    let micro_idx = |name: &str| {
        let (micro_idx, rank) = name.strip_prefix("micro-")?.strip_suffix(".safetensors")?.split_once(".rank-")?;
        number(rank)?;
        number(micro_idx)
    };
    Ok(names(step_dir)?.iter().filter_map(|name| Some((micro_idx(name)?, step_dir.join(name)))).collect())
}

/// Parses digits, which may begin with zeros.
fn number(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// Lists the names in a folder, sorted.
pub(super) fn names(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_and_other_files_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let dir = step_dir(folder.path(), 12);
        fs::create_dir(&dir).unwrap();
        for name in ["step-1x", "steps-3", "step-", "notes"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        assert_eq!(steps(folder.path()).unwrap(), BTreeSet::from([12]));
        let ours = [file_name(3, Some(0)), file_name(3, Some(11)), file_name(20, Some(2))];
        assert_eq!(ours[0], "micro-0003.rank-000.safetensors");
        for name in ours.iter().rev().map(String::as_str).chain([".micro-0001.rank-000.tmp", "micro-1.safetensors"]) {
            fs::write(dir.join(name), "").unwrap();
        }
        let found = files(&dir).unwrap();
        assert_eq!(found, [(3, dir.join(&ours[0])), (3, dir.join(&ours[1])), (20, dir.join(&ours[2]))]);
        assert!(files(&folder.path().join("missing")).unwrap().is_empty());
    }
}
