//! Selection of an evaluation task's file in a folder that holds files of several tasks.
//!
//! [`select_split_files`](super::select_split_files) takes every file of a split, as `datasets` does. Here that
//! would mix the documents of several tasks.

use super::splits::{SplitQuery, SplitSelection, canonical, check_shards, label, own_name, pick, shard};

/// Names that identify the data file of an evaluation task.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TaskFileNames {
    /// Names of the task and of its data set, such as `mmlu_virology` and `virology`.
    pub own: Vec<String>,
    /// Name that several data sets share, such as `mmlu`.
    pub family: Option<String>,
    /// Rule for files without a name of the task.
    pub unnamed: UnnamedFiles,
    /// Option to suggest in errors, such as `--data arc_easy=FILE`.
    pub remedy: String,
}

/// Rule for files that are not named after the task.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum UnnamedFiles {
    /// Accepts the file if it is the only one of the split.
    #[default]
    AcceptOnly,
    /// Accepts the file if it is the only one of the split and has only the split's name, such as `test.jsonl`.
    AcceptSplitNamed,
    /// Rejects the file, because several data sets share the folder.
    Reject,
}

/// Candidate file of a split, or all shards of one.
struct Candidate {
    files: Vec<String>,
    split: Option<String>,
    /// Words of the file name except the split's. Empty if a folder names the split.
    task_words: Vec<String>,
    naming: Naming,
}

/// Match between a file's path and the task's names, from weak to strong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Naming {
    Unnamed,
    Family,
    OwnFolder,
    Own,
}

/// Selects the file of `query.split`. The error lists the candidates.
pub(super) fn select_task_file(
    files: &[String],
    query: &SplitQuery,
    names: &TaskFileNames,
) -> Result<SplitSelection, String> {
    let all = candidates(files, query.split, names);
    let split = split_name(&all, query, &names.remedy)?;
    let of_split: Vec<&Candidate> = all.iter().filter(|candidate| candidate.split == split).collect();
    let naming = of_split.iter().map(|candidate| candidate.naming).max().unwrap_or(Naming::Unnamed);
    let best: Vec<&Candidate> = of_split.into_iter().filter(|candidate| candidate.naming == naming).collect();
    let [one] = best.as_slice() else { return Err(several(&best, query.split, names)) };
    if naming < Naming::OwnFolder {
        check_only_candidate(one, &all, query.split, names)?;
    }
    check_shards(&one.files)?;
    Ok(SplitSelection { files: one.files.clone(), split: one.split.clone().unwrap_or_else(|| query.split.to_owned()) })
}

/// Returns the files whose name contains `query.split`, or all files if no name contains a split.
pub(super) fn of_split(files: &[String], query: &SplitQuery) -> Result<SplitSelection, String> {
    let all = candidates(files, query.split, &TaskFileNames::default());
    if all.iter().all(|candidate| candidate.split.is_none()) {
        return Ok(SplitSelection { files: files.to_vec(), split: query.split.to_owned() });
    }
    let split = split_name(&all, query, "")?;
    let files = all.into_iter().filter(|candidate| candidate.split == split).flat_map(|candidate| candidate.files);
    Ok(SplitSelection { files: files.collect(), split: split.unwrap_or_default() })
}

/// Splits a name into lower-case words at every character that is neither a letter nor a digit.
pub fn name_words(name: &str) -> Vec<String> {
    let words = name.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_lowercase).collect()
}

fn candidates(files: &[String], split: &str, names: &TaskFileNames) -> Vec<Candidate> {
    let mut all: Vec<(Option<String>, Candidate)> = Vec::new();
    for path in files {
        let set = shard(path).map(|(_, _, count)| format!("{}/{}/{count}", folder(path), own_name(path)));
        match all.iter_mut().find(|(other, _)| set.is_some() && *other == set) {
            Some((_, candidate)) => candidate.files.push(path.clone()),
            None => all.push((set, Candidate::new(path, split, names))),
        }
    }
    all.into_iter().map(|(_, candidate)| candidate).collect()
}

impl Candidate {
    fn new(path: &str, split: &str, names: &TaskFileNames) -> Self {
        let whole = name_words(own_name(path));
        let wanted = name_words(split);
        let is_wanted = !wanted.is_empty() && whole.ends_with(&wanted);
        let without_split = &whole[..whole.len() - if is_wanted { wanted.len() } else { 0 }];
        let is_plain = |word: &&String| canonical(word).is_none();
        let names_split = is_wanted || !whole.iter().all(|word| is_plain(&word));
        let words: Vec<String> = without_split.iter().filter(is_plain).cloned().collect();
        let folders: Vec<Vec<String>> = folder(path).split('/').map(name_words).collect();
        let is_in = |names: &[Vec<String>]| folders.iter().any(|folder| names.contains(folder));
        let own: Vec<Vec<String>> = names.own.iter().map(|name| name_words(name)).collect();
        let family: Vec<Vec<String>> = names.family.iter().map(|name| name_words(name)).collect();
        let is_own = own.iter().any(|name| [&words[..], &whole, without_split].contains(&name.as_slice()));
        let naming = if is_own || words.is_empty() && is_in(&own) {
            Naming::Own
        } else if is_in(&own) {
            Naming::OwnFolder
        } else if family.contains(&words) || words.is_empty() && is_in(&family) {
            Naming::Family
        } else {
            Naming::Unnamed
        };
        let split = if is_wanted { Some(split.to_owned()) } else { label(path) };
        Self { files: vec![path.to_owned()], split, task_words: if names_split { words } else { Vec::new() }, naming }
    }

    /// Returns the file's name, or the first shard's.
    fn shown(&self) -> &str {
        self.files.first().map_or("", String::as_str)
    }
}

/// Returns the split's name as the files spell it. `None` if no file name contains a split.
fn split_name(all: &[Candidate], query: &SplitQuery, remedy: &str) -> Result<Option<String>, String> {
    let mut labels: Vec<&str> = all.iter().filter_map(|candidate| candidate.split.as_deref()).collect();
    labels.sort_unstable();
    labels.dedup();
    if labels.is_empty() && !["train", "all"].contains(&query.split) {
        let shown = listed(all.iter());
        return Err(format!("no file name in it has the word {:?}; it holds {shown}. Write {remedy}", query.split));
    }
    if labels.is_empty() {
        return Ok(None);
    }
    pick(&labels, query).map(|name| Some(name.to_owned()))
}

/// Returns an error if the only candidate file of the split may belong to another task.
fn check_only_candidate(one: &Candidate, all: &[Candidate], split: &str, names: &TaskFileNames) -> Result<(), String> {
    let named: Vec<&Candidate> = all.iter().filter(|candidate| candidate.naming >= Naming::OwnFolder).collect();
    if !named.is_empty() {
        let shown = listed(named);
        return Err(format!("no file of the split {split:?} is named after the task; files of its name: {shown}"));
    }
    let is_other = |other: &&Candidate| !other.task_words.is_empty() && other.task_words != one.task_words;
    let is_of_several = !one.task_words.is_empty() && all.iter().any(|other| is_other(&other));
    let is_refused = match (names.unnamed, one.naming) {
        (UnnamedFiles::Reject, _) => true,
        (_, Naming::Family) => false,
        (UnnamedFiles::AcceptSplitNamed, _) => !one.task_words.is_empty(),
        (UnnamedFiles::AcceptOnly, _) => is_of_several,
    };
    match is_refused {
        false => Ok(()),
        true => Err(format!(
            "no file of the split {split:?} is named {}; there is {}. Write {}",
            names.own.join(" or "),
            one.shown(),
            names.remedy
        )),
    }
}

fn several(best: &[&Candidate], split: &str, names: &TaskFileNames) -> String {
    let why = match best.first().map(|candidate| candidate.naming) {
        Some(Naming::Own | Naming::OwnFolder) => "are named after the task".to_owned(),
        _ => format!("are there, and none is named {}", names.own.join(" or ")),
    };
    let shown = listed(best.iter().copied());
    format!(
        "{} files of the split {split:?} {why}: {shown}. Write {} for one of them, or a pattern such as *{split}* for all",
        best.len(),
        names.remedy
    )
}

/// Lists candidates by their first file.
fn listed<'a>(candidates: impl IntoIterator<Item = &'a Candidate>) -> String {
    super::splits::some(&candidates.into_iter().map(|candidate| candidate.shown().to_owned()).collect::<Vec<_>>())
}

fn folder(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn names(own: &[&str], family: &str, unnamed: UnnamedFiles) -> TaskFileNames {
        let own = own.iter().map(ToString::to_string).collect();
        TaskFileNames { own, family: Some(family.into()), unnamed, remedy: "--data TASK=FILE".into() }
    }

    fn chosen(paths: &[&str], split: &str, names: &TaskFileNames) -> Result<Vec<String>, String> {
        let paths: Vec<String> = paths.iter().map(ToString::to_string).collect();
        let query = SplitQuery { split, is_default: false, config: None, data_files: &[] };
        select_task_file(&paths, &query, names).map(|selection| selection.files)
    }

    #[track_caller]
    fn check(paths: &[&str], split: &str, names: &TaskFileNames, want: &[&str]) {
        assert_eq!(chosen(paths, split, names).unwrap(), want);
    }

    #[track_caller]
    fn refused(paths: &[&str], split: &str, names: &TaskFileNames, words: &[&str]) {
        let problem = chosen(paths, split, names).unwrap_err();
        for word in words {
            assert!(problem.contains(word), "{word:?} is not in {problem:?}");
        }
    }

    fn virology() -> TaskFileNames {
        names(&["mmlu_virology", "virology"], "mmlu", UnnamedFiles::Reject)
    }

    fn arc() -> TaskFileNames {
        names(&["arc_easy", "ARC-Easy"], "ai2_arc", UnnamedFiles::AcceptOnly)
    }

    #[test]
    fn a_file_named_after_the_task_wins() {
        check(
            &["anatomy_test.csv", "virology_dev.csv", "virology_test.csv"],
            "test",
            &virology(),
            &["virology_test.csv"],
        );
        check(&["a_test.jsonl", "mmlu_virology_test.jsonl"], "test", &virology(), &["mmlu_virology_test.jsonl"]);
        check(&["arc_challenge_test.jsonl", "arc_easy_test.jsonl"], "test", &arc(), &["arc_easy_test.jsonl"]);
        check(&["arc_easy/test.jsonl", "gsm8k/test.jsonl"], "test", &arc(), &["arc_easy/test.jsonl"]);
        check(&["arc_easy/questions-test.jsonl", "b/test.jsonl"], "test", &arc(), &["arc_easy/questions-test.jsonl"]);
        check(&["ARC-Easy-test.jsonl", "test.jsonl"], "test", &arc(), &["ARC-Easy-test.jsonl"]);
        check(&["ai2_arc_test.jsonl", "other_test.jsonl"], "test", &arc(), &["ai2_arc_test.jsonl"]);
    }

    #[test]
    fn a_name_counts_as_a_whole() {
        let biology = names(&["mmlu_high_school_biology", "high_school_biology"], "mmlu", UnnamedFiles::Reject);
        let both = ["biology_test.csv", "high_school_biology_test.csv"];
        check(&both, "test", &biology, &["high_school_biology_test.csv"]);
        let short = names(&["biology"], "mmlu", UnnamedFiles::AcceptOnly);
        check(&both, "test", &short, &["biology_test.csv"]);
        check(&["arc_easy_test.jsonl", "arc_easy_v2_test.jsonl"], "test", &arc(), &["arc_easy_test.jsonl"]);
        refused(&["arc_easy_v2_test.jsonl", "arc_challenge_test.jsonl"], "test", &arc(), &["none is named arc_easy"]);
        let my_test = names(&["my_test"], "own", UnnamedFiles::Reject);
        check(&["my_test_test.jsonl", "x_test.jsonl"], "test", &my_test, &["my_test_test.jsonl"]);
    }

    #[test]
    fn shards_are_one_candidate() {
        let shards = ["ARC-Easy/test-00000-of-00002.parquet", "ARC-Easy/test-00001-of-00002.parquet"];
        check(&[shards[0], shards[1], "ARC-Challenge/test-00000-of-00001.parquet"], "test", &arc(), &shards);
        refused(&shards[1..], "test", &arc(), &["number 00000"]);
    }

    #[test]
    fn several_candidates_are_an_error_that_lists_them() {
        refused(
            &["a_test.jsonl", "b_test.jsonl"],
            "test",
            &arc(),
            &["2 files", "a_test.jsonl, b_test.jsonl. Write --data TASK=FILE for one", "*test*"],
        );
        let twice = ["arc_easy/test.jsonl", "arc_easy_test.jsonl"];
        refused(&twice, "test", &arc(), &["named after the task: arc_easy/test.jsonl, arc_easy_test.jsonl"]);
        refused(&["test.jsonl", "test.parquet"], "test", &arc(), &["test.jsonl, test.parquet"]);
    }

    #[test]
    fn a_lone_file_is_taken_unless_it_may_be_another_tasks() {
        check(&["train.jsonl", "test.jsonl"], "test", &arc(), &["test.jsonl"]);
        check(&["train/a.json", "test/b.json"], "test", &arc(), &["test/b.json"]);
        check(&["mine_train.jsonl", "mine_test.jsonl"], "test", &arc(), &["mine_test.jsonl"]);
        refused(
            &["arc_easy_train.jsonl", "piqa_test.jsonl"],
            "test",
            &arc(),
            &["files of its name: arc_easy_train.jsonl"],
        );
        refused(&["mine_train.jsonl", "piqa_test.jsonl"], "test", &arc(), &["there is piqa_test.jsonl"]);
        let by_pattern = TaskFileNames { unnamed: UnnamedFiles::AcceptSplitNamed, ..arc() };
        check(&["test.jsonl"], "test", &by_pattern, &["test.jsonl"]);
        refused(
            &["piqa_test.jsonl"],
            "test",
            &by_pattern,
            &["no file of the split \"test\" is named arc_easy or ARC-Easy"],
        );
        refused(&["test.jsonl"], "test", &virology(), &["named mmlu_virology or virology"]);
    }

    #[test]
    fn splits_have_their_usual_spellings() {
        check(&["virology_val.csv", "virology_dev.csv"], "dev", &virology(), &["virology_dev.csv"]);
        check(&["virology_val.csv", "virology_test.csv"], "validation", &virology(), &["virology_val.csv"]);
        check(&["arc_easy_latest.jsonl", "arc_easy_test.jsonl"], "latest", &arc(), &["arc_easy_latest.jsonl"]);
        refused(&["arc_easy_train.jsonl"], "test", &arc(), &["it has no split \"test\"; there are: train"]);
        refused(&["arc_easy.jsonl"], "test", &arc(), &["has the word \"test\""]);
    }

    #[test]
    fn a_pattern_takes_all_files_of_the_split() {
        let of = |paths: &[&str], split| {
            let paths: Vec<String> = paths.iter().map(ToString::to_string).collect();
            of_split(&paths, &SplitQuery { split, is_default: false, config: None, data_files: &[] })
        };
        let arc = ["arc_easy_test.jsonl", "arc_easy_train.jsonl"];
        assert_eq!(of(&arc, "test").unwrap().files, arc[..1]);
        assert_eq!(of(&["a_test.jsonl", "b_test.jsonl", "b_dev.jsonl"], "test").unwrap().files.len(), 2);
        assert_eq!(of(&["a.jsonl", "b.jsonl"], "test").unwrap().files.len(), 2);
        assert!(of(&arc[1..], "test").unwrap_err().contains("there are: train"));
    }
}
