//! Names of the files that a source reads, for logs and results.

/// Files that a source reads, and the split that they form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceFiles {
    /// Folder or Hub id that the paths are relative to. `None` if the paths are complete.
    pub place: Option<String>,
    /// Paths in row order.
    pub paths: Vec<String>,
    /// Number of data files that the paths were selected from.
    pub n_available: usize,
    /// Split name as the data set spells it, if the split selected the files.
    pub split: Option<String>,
}

/// Largest number of files listed in a description.
const MAX_NAMED: usize = 3;

impl SourceFiles {
    /// Returns the paths with their folder or Hub id.
    pub fn full_paths(&self) -> Vec<String> {
        let full = |path: &String| match &self.place {
            Some(place) => format!("{}/{path}", place.trim_end_matches('/')),
            None => path.clone(),
        };
        self.paths.iter().map(full).collect()
    }

    /// Describes the selection, as in `1 of 50 files: training.jsonl (split train)`. `None` if there is one file
    /// only.
    pub fn describe_selection(&self) -> Option<String> {
        let n = self.paths.len();
        let split = self.split.as_ref().map_or(String::new(), |split| format!(" (split {split})"));
        (self.n_available > 1).then(|| format!("{n} of {} files: {}{split}", self.n_available, named(&self.paths)))
    }

    /// Appends the files of a source that is read after this one.
    pub(super) fn join(mut self, other: Self) -> Self {
        if self.place == other.place {
            self.n_available = self.n_available.max(other.n_available);
            self.split = self.split.zip(other.split).map(|(a, b)| if a == b { a } else { format!("{a}+{b}") });
            self.paths.extend(other.paths.into_iter().filter(|path| !self.paths.contains(path)).collect::<Vec<_>>());
            return self;
        }
        let n_available = self.n_available + other.n_available;
        let paths = [self.full_paths(), other.full_paths()].concat();
        Self { place: None, paths, n_available, split: None }
    }
}

/// Lists the first three paths and counts the others.
pub fn named(paths: &[String]) -> String {
    let shown = paths.iter().take(MAX_NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match paths.len().saturating_sub(MAX_NAMED) {
        0 => shown,
        n => format!("{shown} and {n} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(paths: &[&str], n_available: usize, split: &str) -> SourceFiles {
        let paths = paths.iter().map(ToString::to_string).collect();
        SourceFiles { place: Some("data/".into()), paths, n_available, split: Some(split.into()) }
    }

    #[test]
    fn a_choice_among_files_is_described() {
        let one = files(&["a.jsonl"], 50, "train");
        assert_eq!(one.describe_selection().as_deref(), Some("1 of 50 files: a.jsonl (split train)"));
        assert_eq!(one.full_paths(), ["data/a.jsonl"]);
        assert_eq!(files(&["a.jsonl"], 1, "train").describe_selection(), None);
        let many = files(&["a", "b", "c", "d", "e"], 5, "test").describe_selection();
        assert_eq!(many.as_deref(), Some("5 of 5 files: a, b, c and 2 more (split test)"));
    }

    #[test]
    fn files_of_two_splits_are_joined() {
        let both = files(&["a"], 3, "train").join(files(&["b", "a"], 3, "test"));
        assert_eq!(both.describe_selection().as_deref(), Some("2 of 3 files: a, b (split train+test)"));
        let elsewhere = SourceFiles { place: Some("other".into()), ..files(&["b"], 1, "train") };
        assert_eq!(files(&["a"], 1, "train").join(elsewhere).paths, ["data/a", "other/b"]);
    }
}
