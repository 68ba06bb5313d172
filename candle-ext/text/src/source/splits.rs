//! Selection of a split's files in a folder or repository, by the Hub's conventions.
//!
//! The first rule that applies decides:
//! 1. the `configs` of the dataset card,
//! 2. shard names such as `data/train-00000-of-00002.parquet`,
//! 3. a split name as a word of a file or folder name,
//! 4. otherwise all files form the split `train`.

use globset::GlobBuilder;

use super::DatasetCard;
use super::dataset_card::CardConfig;
use super::file_format::{check_one_kind, data_files};
use crate::suggestion::nearest;

/// Request for the files of one split.
#[derive(Debug, Clone, Copy)]
pub struct SplitQuery<'a> {
    /// Name of the split.
    pub split: &'a str,
    /// True if the user named no split. Files without split names are then accepted.
    pub is_default: bool,
    /// Configuration (subset): a name in the dataset card, or a folder.
    pub config: Option<&'a str>,
    /// Glob patterns of the files. They override the other rules.
    pub data_files: &'a [String],
}

/// Files of a split, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SplitSelection {
    /// Paths as listed.
    pub files: Vec<String>,
    /// Name of the split as the data set spells it.
    pub split: String,
}

/// Spellings of the three common splits.
const SPELLINGS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// Selects the files of a split out of relative `paths`. The error lists the available names.
pub fn select_split_files(
    paths: &[String],
    card: Option<&DatasetCard>,
    query: &SplitQuery,
) -> Result<SplitSelection, String> {
    let files = data_files(paths.iter().cloned());
    if files.is_empty() {
        return Err(nothing_to_read(paths));
    }
    let selection = if !query.data_files.is_empty() {
        named_outright(&files, query)
    } else if let Some(card) = card {
        by_card(&files, card.config(query.config)?, query)
    } else {
        by_names(&below_config(files, query.config)?, query)
    }?;
    check_one_kind(&selection.files)?;
    check_shards(&selection.files)?;
    Ok(selection)
}

impl SplitSelection {
    /// Warns if an evaluation split is missing and all rows are used instead.
    pub(crate) fn warn_of_stand_in(&self, place: impl std::fmt::Display, query: &SplitQuery) {
        let is_wanted = query.is_default && !["train", "all"].contains(&query.split);
        if is_wanted && query.data_files.is_empty() && self.split == "train" {
            tracing::warn!("{place} has no evaluation split ({:?}): all its rows are used", query.split);
        }
    }
}

/// Returns the paths that match a glob pattern. `*` does not match `/`; `**` does.
pub(crate) fn matching<'a>(pattern: &str, paths: impl IntoIterator<Item = &'a String>) -> Result<Vec<String>, String> {
    let pattern = pattern.trim_start_matches("./");
    let glob = GlobBuilder::new(pattern)
        .literal_separator(true)
        .build()
        .map_err(|e| format!("the pattern {pattern:?} is not one: {}", e.kind()))?
        .compile_matcher();
    let mut found: Vec<String> = paths.into_iter().filter(|path| glob.is_match(path)).cloned().collect();
    found.sort();
    Ok(found)
}

/// Returns the patterns for `split`: those of the split and those of all splits.
pub(crate) fn patterns_of(data_files: &[(Option<String>, String)], split: &str) -> Result<Vec<String>, String> {
    let is_for = |of: &Option<String>| of.as_ref().is_none_or(|of| of == split);
    let patterns: Vec<String> = data_files.iter().filter(|(of, _)| is_for(of)).map(|(_, p)| p.clone()).collect();
    if patterns.is_empty() && !data_files.is_empty() {
        let names: Vec<&str> = data_files.iter().filter_map(|(of, _)| of.as_deref()).collect();
        return Err(format!("data_files names no files of the split {split:?}; it has {}", names.join(", ")));
    }
    Ok(patterns)
}

fn named_outright(files: &[String], query: &SplitQuery) -> Result<SplitSelection, String> {
    let mut chosen = Vec::new();
    for pattern in query.data_files {
        let found = matching(pattern, files)?;
        if found.is_empty() {
            return Err(format!("no file matches {pattern:?}; there are: {}", some(files)));
        }
        chosen.extend(found);
    }
    Ok(SplitSelection { files: chosen, split: query.split.to_owned() })
}

fn by_card(files: &[String], config: &CardConfig, query: &SplitQuery) -> Result<SplitSelection, String> {
    let splits = config.splits();
    if splits.is_empty() {
        let below = config.data_dir.as_deref().map(|dir| dir.trim_matches('/'));
        return by_names(&below_config(files.to_vec(), below)?, query);
    }
    let names: Vec<&str> = splits.iter().map(|(split, _)| *split).collect();
    let name = pick(&names, query)?;
    let mut chosen = Vec::new();
    for pattern in splits.iter().filter(|(split, _)| *split == name).flat_map(|(_, p)| p) {
        chosen.extend(matching(pattern, files)?);
    }
    if chosen.is_empty() {
        return Err(format!("the README names files for {name:?} that are not there"));
    }
    Ok(SplitSelection { files: chosen, split: name.to_owned() })
}

fn by_names(files: &[String], query: &SplitQuery) -> Result<SplitSelection, String> {
    let exact: Vec<String> = files.iter().filter(|path| own_name(path) == query.split).cloned().collect();
    if !exact.is_empty() {
        return Ok(SplitSelection { files: exact, split: query.split.to_owned() });
    }
    let labels: Vec<Option<String>> = files.iter().map(|path| label(path)).collect();
    let mut names: Vec<&str> = labels.iter().flatten().map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        return match query.split {
            split if query.is_default || split == "train" || split == "all" => {
                Ok(SplitSelection { files: files.to_vec(), split: "train".into() })
            }
            split => Err(format!(
                "its files name no splits, so all of it is \"train\"; there is no {split:?} among {}",
                some(files)
            )),
        };
    }
    let name = pick(&names, query)?;
    let chosen = files.iter().zip(&labels).filter(|(_, label)| label.as_deref() == Some(name));
    Ok(SplitSelection { files: chosen.map(|(path, _)| path.clone()).collect(), split: name.into() })
}

/// Returns the name that a split query means: the exact name, or another spelling. `eval` means `validation`, else
/// `test`.
pub(super) fn pick<'a>(names: &[&'a str], query: &SplitQuery) -> Result<&'a str, String> {
    let find = |wanted: &str| names.iter().copied().find(|name| *name == wanted);
    let other =
        || canonical(query.split).and_then(|wanted| names.iter().copied().find(|name| canonical(name) == Some(wanted)));
    let held_out = || match query.split {
        "eval" => ["validation", "test"].into_iter().find_map(find),
        _ => None,
    };
    find(query.split).or_else(held_out).or_else(other).ok_or_else(|| {
        let near = nearest(query.split, names);
        let near = near.map_or(String::new(), |name| format!("; did you mean {name:?}?"));
        format!("it has no split {:?}; there are: {}{near}", query.split, names.join(", "))
    })
}

fn below_config(files: Vec<String>, config: Option<&str>) -> Result<Vec<String>, String> {
    let Some(config) = config.filter(|config| *config != "default") else {
        return Ok(files);
    };
    let prefix = format!("{config}/");
    let below: Vec<String> = files.iter().filter(|p| p.starts_with(&prefix)).cloned().collect();
    if below.is_empty() {
        let mut folders: Vec<&str> = files.iter().filter_map(|p| Some(p.split_once('/')?.0)).collect();
        folders.dedup();
        return Err(format!("it has no configuration {config:?}; folders: {}", folders.join(", ")));
    }
    Ok(below)
}

/// Returns the split that a file's name contains, if any.
pub(super) fn label(path: &str) -> Option<String> {
    let own = own_name(path);
    if shard(path).is_some() {
        return Some(canonical(own).map_or_else(|| own.to_owned(), str::to_owned));
    }
    let folders = path.rsplit('/').skip(1);
    std::iter::once(own).chain(folders).find_map(word_label).map(str::to_owned)
}

fn word_label(name: &str) -> Option<&'static str> {
    name.split(|c: char| "-._ ".contains(c) || c.is_ascii_digit()).find_map(canonical)
}

pub(super) fn canonical(word: &str) -> Option<&'static str> {
    SPELLINGS.iter().find(|(_, words)| words.contains(&word)).map(|(name, _)| *name)
}

/// Returns a file's name without folders, extension and shard number.
pub(super) fn own_name(path: &str) -> &str {
    let stem = stem(path);
    shard(path).map_or(stem, |(name, ..)| name)
}

fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.split_once('.').map_or(name, |(stem, _)| stem)
}

/// Parses a shard name such as `name-00001-of-00003` into name, number and count.
pub(super) fn shard(path: &str) -> Option<(&str, usize, usize)> {
    let mut parts = stem(path).rsplitn(2, "-of-");
    let (count, rest) = (parts.next()?, parts.next()?);
    let (name, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| {
        let head = text.split('-').next()?;
        (head.len() >= 4 && head.bytes().all(|b| b.is_ascii_digit())).then(|| head.parse().ok())?
    };
    Some((name, digits(number)?, digits(count)?))
}

/// Checks that no shard is missing.
pub(super) fn check_shards(files: &[String]) -> Result<(), String> {
    for path in files {
        let Some((_, _, count)) = shard(path) else { continue };
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let siblings: Vec<usize> = files
            .iter()
            .filter(|p| p.rsplit_once('/').map_or("", |(f, _)| f) == folder && own_name(p) == own_name(path))
            .filter_map(|p| shard(p).filter(|(.., n)| *n == count).map(|(_, i, _)| i))
            .collect();
        if let Some(missing) = (0..count).find(|i| !siblings.contains(i)) {
            return Err(format!(
                "{} of {count} files are there, number {missing:05} next to {path} is missing",
                siblings.len()
            ));
        }
    }
    Ok(())
}

fn nothing_to_read(paths: &[String]) -> String {
    if paths.iter().any(|path| path.ends_with(".arrow")) {
        return "it holds Arrow files, as save_to_disk writes them; write it with to_parquet or \
                to_json instead"
            .into();
    }
    if paths.iter().any(|p| [".gz", ".zst", ".zip", ".xz", ".bz2"].iter().any(|ending| p.ends_with(ending))) {
        return format!("its files are compressed ({}); unpack them first", some(paths));
    }
    if paths.iter().any(|path| path.ends_with(".py")) {
        return "it is made by a Python script, which is not run here; look for a Parquet branch \
                (revision refs/convert/parquet)"
            .into();
    }
    format!("no .json, .jsonl, .parquet, .csv or .txt file is in it, only: {}", some(paths))
}

pub(super) fn some(files: &[String]) -> String {
    let shown = files.iter().take(8).map(String::as_str).collect::<Vec<_>>().join(", ");
    match files.len() {
        0 => "nothing".into(),
        n if n > 8 => format!("{shown} and {} more", n - 8),
        _ => shown,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn query(split: &str) -> SplitQuery<'_> {
        SplitQuery { split, is_default: false, config: None, data_files: &[] }
    }

    fn strings(paths: &[&str]) -> Vec<String> {
        paths.iter().map(ToString::to_string).collect()
    }

    #[track_caller]
    fn check(paths: &[&str], split: &str, want: &[&str]) {
        assert_eq!(select_split_files(&strings(paths), None, &query(split)).unwrap().files, want);
    }

    #[track_caller]
    fn refused(paths: &[&str], split: &str, want: &str) {
        let problem = select_split_files(&strings(paths), None, &query(split)).unwrap_err();
        assert!(problem.contains(want), "{want:?} is not in {problem:?}");
    }

    const ULTRACHAT: [&str; 5] = [
        "README.md",
        "data/train_sft-00001-of-00002-f7dfac4afe5b93f4.parquet",
        "data/train_sft-00000-of-00002-a3ecf92756993583.parquet",
        "data/train_gen-00000-of-00001.parquet",
        "data/test_sft-00000-of-00001.parquet",
    ];

    #[test]
    fn shards_are_a_split_of_any_name() {
        check(
            &ULTRACHAT,
            "train_sft",
            &[
                "data/train_sft-00000-of-00002-a3ecf92756993583.parquet",
                "data/train_sft-00001-of-00002-f7dfac4afe5b93f4.parquet",
            ],
        );
        refused(&ULTRACHAT, "train", "there are: test_sft, train_gen, train_sft");
    }

    #[test]
    fn a_missing_shard_is_noticed() {
        refused(&["data/train-00000-of-00003.parquet", "data/train-00002-of-00003.parquet"], "train", "number 00001");
    }

    #[test]
    fn split_words_in_names_and_folders() {
        check(&["train.jsonl", "test.jsonl", "LICENSE.txt"], "train", &["train.jsonl"]);
        check(&["my-dev.v2.csv", "train.csv"], "validation", &["my-dev.v2.csv"]);
        check(&["test/a.json", "train/b.json", "train/a.json"], "train", &["train/a.json", "train/b.json"]);
        check(&["train.jsonl", "valid.jsonl", "test.jsonl"], "eval", &["valid.jsonl"]);
        check(&["train.jsonl", "test.jsonl"], "eval", &["test.jsonl"]);
    }

    #[test]
    fn files_without_split_words_are_train() {
        check(&["MetaMathQA-395K.json", "README.md"], "train", &["MetaMathQA-395K.json"]);
        refused(&["MetaMathQA-395K.json"], "test", "all of it is \"train\"");
        let default = SplitQuery { is_default: true, ..query("eval") };
        let chosen = select_split_files(&strings(&["a.jsonl"]), None, &default).unwrap();
        assert_eq!(chosen.files, ["a.jsonl"]);
    }

    #[test]
    fn a_near_miss_gets_a_hint() {
        refused(&["train.jsonl", "test.jsonl"], "trian", "did you mean \"train\"?");
    }

    #[test]
    fn mixed_kinds_scripts_and_archives_are_explained() {
        refused(&["train.jsonl", "train.parquet"], "train", "mixes 1 json and 1 parquet");
        refused(&["data.py"], "train", "Python script");
        refused(&["train.jsonl.xz"], "train", "compressed");
        check(&["train.jsonl.gz", "test.csv.zst"], "train", &["train.jsonl.gz"]);
        refused(&["data-00000-of-00001.arrow", "state.json"], "train", "save_to_disk");
    }

    const GSM8K: &str = "---\nlicense: mit\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n- config_name: socratic\n  data_files:\n  - split: train\n    path: [socratic/train-*]\n---\n# GSM8K\n";

    #[test]
    fn splits_of_the_dataset_card_take_precedence() {
        let card = DatasetCard::parse(GSM8K).unwrap();
        let paths = strings(&[
            "main/train-00000-of-00001.parquet",
            "main/test-00000-of-00001.parquet",
            "socratic/train-00000-of-00001.parquet",
        ]);
        let with = |config| SplitQuery { config, ..query("train") };
        let chosen = select_split_files(&paths, Some(&card), &with(Some("socratic"))).unwrap();
        assert_eq!(chosen.files, ["socratic/train-00000-of-00001.parquet"]);
        let problem = select_split_files(&paths, Some(&card), &with(None)).unwrap_err();
        assert!(problem.contains("name one of: main, socratic"), "{problem}");
        let problem = select_split_files(&paths, Some(&card), &with(Some("mian"))).unwrap_err();
        assert!(problem.contains("no configuration \"mian\""), "{problem}");
    }

    #[test]
    fn a_dataset_card_without_configs_is_ignored() {
        assert!(DatasetCard::parse("---\nlicense: mit\n---\n").is_none());
        assert!(DatasetCard::parse("# just a title").is_none());
        assert!(DatasetCard::parse("---\n: : [\n---\n").is_none());
    }

    #[test]
    fn files_named_outright() {
        let patterns = strings(&["extra/*.jsonl"]);
        let query = SplitQuery { data_files: &patterns, ..query("train") };
        let paths = strings(&["train.jsonl", "extra/b.jsonl", "extra/a.jsonl"]);
        assert_eq!(select_split_files(&paths, None, &query).unwrap().files, ["extra/a.jsonl", "extra/b.jsonl"]);
        let problem = select_split_files(&strings(&["train.jsonl"]), None, &query).unwrap_err();
        assert!(problem.contains("no file matches"), "{problem}");
    }
}
