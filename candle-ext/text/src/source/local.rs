//! Local data sets: a file, a folder or a glob pattern.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::file_format::open_file;
use super::splits::{SplitQuery, SplitSelection, matching, patterns_of, select_split_files};
use super::task_file::{TaskFileNames, UnnamedFiles, of_split, select_task_file};
use super::{
    ConcatSource, DatasetCard, ReadOptions, RowSource, SliceSource, SourceError, SourceFiles, SourceWithFiles,
    SplitSlice,
};
use crate::files::{MAX_CONFIG_FILE_BYTES, read_regular_text_file};
use crate::suggestion::nearest;

/// Request for rows of a local data set.
#[derive(Debug, Clone, Default)]
pub struct LocalRequest {
    /// A file, a folder, or a glob pattern such as `data/*.jsonl`.
    pub path: String,
    /// Configuration (subset): a folder below `path`, or a name in the dataset card.
    pub config: Option<String>,
    /// Requested splits. If empty, `default_split` is used.
    pub parts: Vec<SplitSlice>,
    /// Split that is used if none is requested.
    pub default_split: String,
    /// Glob patterns of files, each for one split or for all.
    pub data_files: Vec<(Option<String>, String)>,
    /// True if `data_files` are complete paths, so that `path` is unused.
    pub is_pattern_list: bool,
    /// Rule that selects the files of a split in a folder.
    pub files: FileSelector,
    /// Options for reading the files.
    pub read: ReadOptions,
}

/// Rule that selects the files of a split in a folder or glob pattern.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum FileSelector {
    /// Every file whose name contains the split, as in Hugging Face `datasets`.
    #[default]
    All,
    /// One file or one set of shards with a name of the evaluation task. Of a glob pattern, every file of the split.
    ForTask(TaskFileNames),
}

/// Depth limit of the file search.
const MAX_DEPTH: usize = 16;

/// Opens the requested rows.
pub fn open_local(request: &LocalRequest) -> Result<Box<dyn RowSource>, SourceError> {
    let path = Path::new(&request.path);
    let default = [SplitSlice { split: request.default_split.clone(), slice: Default::default() }];
    let parts = if request.parts.is_empty() { &default[..] } else { &request.parts };
    let sources = parts.iter().map(|part| {
        let files = if request.is_pattern_list {
            let patterns = patterns_of(&request.data_files, &part.split)
                .map_err(|problem| SourceError::not_available(&request.path, problem))?;
            of_themselves(patterns.iter().map(|pattern| expand(pattern)).collect::<Result<Vec<_>, _>>()?.concat())
        } else if path.is_dir() {
            files_of_split(path, &part.split, request)?
        } else if path.exists() {
            if !request.data_files.is_empty() {
                let problem = "it is a file; data_files name files of a folder. Remove one of the two".to_owned();
                return Err(SourceError::not_available(&request.path, problem));
            }
            check_split_of_file(path, part, request)?;
            of_themselves(vec![path.to_owned()])
        } else {
            files_of_pattern(&part.split, request)?
        };
        let paths: Vec<PathBuf> = files.full_paths().into_iter().map(PathBuf::from).collect();
        let inner = open_files(&paths, &request.read)?;
        slice(Box::new(SourceWithFiles { inner, files }), part)
    });
    Ok(join(sources.collect::<Result<_, _>>()?))
}

/// Opens files of one format as one source, in the given order. No rows at all is an error.
pub fn open_files(files: &[PathBuf], options: &ReadOptions) -> Result<Box<dyn RowSource>, SourceError> {
    let parts = files.iter().map(|file| open_file(file, options)).collect::<Result<Vec<_>, _>>()?;
    let source = join(parts);
    if source.is_empty() {
        let names: Vec<_> = files.iter().take(3).map(|f| f.display().to_string()).collect();
        return Err(SourceError::empty(names.join(", "), "there are no rows in it"));
    }
    Ok(source)
}

pub(crate) fn slice(source: Box<dyn RowSource>, part: &SplitSlice) -> Result<Box<dyn RowSource>, SourceError> {
    let range = part
        .slice
        .resolve(source.len())
        .map_err(|problem| SourceError::not_available(format!("split {:?}", part.split), problem))?;
    Ok(if range == (0..source.len()) { source } else { Box::new(SliceSource::new(source, range)) })
}

pub(crate) fn join(mut parts: Vec<Box<dyn RowSource>>) -> Box<dyn RowSource> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Box::new(ConcatSource::new(parts)),
    }
}

/// Lists all files below a folder, as sorted relative paths with `/`.
pub(crate) fn list(folder: &Path) -> Result<Vec<String>, SourceError> {
    let mut walk = Walk { root: folder.canonicalize().map_err(|e| SourceError::io(folder, e))?, ..Walk::default() };
    walk.folder(folder, "", MAX_DEPTH)?;
    walk.paths.sort();
    Ok(walk.paths)
}

/// File search that enters each folder once, whatever links lead to it.
#[derive(Default)]
struct Walk {
    root: PathBuf,
    entered: HashSet<PathBuf>,
    paths: Vec<String>,
}

impl Walk {
    /// Returns true if the folder is new. A folder above the root is never entered, since a link to it would add its
    /// other subfolders.
    fn enters(&mut self, folder: &Path) -> bool {
        let Ok(real) = folder.canonicalize() else { return false };
        let is_above = self.root.starts_with(&real) && self.root != real;
        !is_above && self.entered.insert(real)
    }

    fn folder(&mut self, folder: &Path, prefix: &str, depth: usize) -> Result<(), SourceError> {
        if !self.enters(folder) {
            return Ok(());
        }
        for entry in std::fs::read_dir(folder).map_err(|e| SourceError::io(folder, e))? {
            let entry = entry.map_err(|e| SourceError::io(folder, e))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with('.') {
                continue;
            }
            let path = entry.path();
            if path.is_dir() {
                if depth > 0 {
                    self.folder(&path, &format!("{prefix}{name}/"), depth - 1)?;
                }
            } else {
                self.paths.push(format!("{prefix}{name}"));
            }
        }
        Ok(())
    }
}

/// Wraps explicitly named files.
fn of_themselves(files: Vec<PathBuf>) -> SourceFiles {
    let paths: Vec<String> = files.iter().map(|file| file.to_string_lossy().into_owned()).collect();
    SourceFiles { n_available: paths.len(), paths, ..SourceFiles::default() }
}

fn files_of_split(folder: &Path, split: &str, request: &LocalRequest) -> Result<SourceFiles, SourceError> {
    let wrong = |problem| SourceError::not_available(folder.display(), problem);
    let data_files = patterns_of(&request.data_files, split).map_err(wrong)?;
    let card = read_regular_text_file(&folder.join("README.md"), MAX_CONFIG_FILE_BYTES).ok();
    let card = card.as_deref().and_then(DatasetCard::parse);
    let query = SplitQuery {
        split,
        is_default: request.parts.is_empty(),
        config: request.config.as_deref(),
        data_files: &data_files,
    };
    let paths = list(folder)?;
    let usable = super::data_files(paths.iter().cloned());
    let selection = match &request.files {
        FileSelector::ForTask(names) if card.is_none() && data_files.is_empty() && !usable.is_empty() => {
            select_task_file(&usable, &query, names)
        }
        _ => select_split_files(&paths, card.as_ref(), &query),
    };
    let selection = selection.map_err(wrong)?;
    selection.warn_of_stand_in(folder.display(), &query);
    let SplitSelection { files, split } = selection;
    let paths = once_each(folder, files);
    let place = Some(folder.display().to_string());
    Ok(SourceFiles { place, paths, n_available: usable.len(), split: Some(split) })
}

fn files_of_pattern(split: &str, request: &LocalRequest) -> Result<SourceFiles, SourceError> {
    let found = of_themselves(expand(&request.path)?);
    let query = SplitQuery { split, is_default: false, config: None, data_files: &[] };
    let selection = match &request.files {
        FileSelector::All => return Ok(SourceFiles { paths: once_each(Path::new(""), found.paths), ..found }),
        FileSelector::ForTask(names) if names.unnamed == UnnamedFiles::Reject => {
            select_task_file(&found.paths, &query, names)
        }
        FileSelector::ForTask(_) => of_split(&found.paths, &query),
    };
    let SplitSelection { files, split } =
        selection.map_err(|problem| SourceError::not_available(&request.path, problem))?;
    let paths = once_each(Path::new(""), files);
    Ok(SourceFiles { paths, split: Some(split), ..found })
}

/// Drops links to other files of the list, whose rows would be read twice.
fn once_each(folder: &Path, mut paths: Vec<String>) -> Vec<String> {
    let is_link = |path: &String| std::fs::symlink_metadata(folder.join(path)).is_ok_and(|found| found.is_symlink());
    let real = |path: &String| folder.join(path).canonicalize().ok();
    let files: HashSet<PathBuf> = paths.iter().filter(|path| !is_link(path)).filter_map(real).collect();
    paths.retain(|path| !is_link(path) || real(path).is_none_or(|real| !files.contains(&real)));
    paths
}

fn check_split_of_file(path: &Path, part: &SplitSlice, request: &LocalRequest) -> Result<(), SourceError> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    if request.parts.is_empty() || ["train", "all", stem.as_ref()].contains(&part.split.as_str()) {
        return Ok(());
    }
    let problem = format!(
        "a single file is all one split, \"train\"; it has no {:?}. Name another file, or write \
         {}:train[90%:] for a part of it",
        part.split,
        path.display()
    );
    Err(SourceError::not_available(path.display(), problem))
}

/// Returns the files that match a glob pattern.
fn expand(pattern: &str) -> Result<Vec<PathBuf>, SourceError> {
    let is_pattern = |text: &str| text.contains(['*', '?', '[', '{']);
    if Path::new(pattern).is_file() {
        return Ok(vec![pattern.into()]);
    }
    if !is_pattern(pattern) {
        return Err(SourceError::not_available(pattern, missing(Path::new(pattern))));
    }
    let fixed: Vec<&str> = pattern.split('/').take_while(|part| !is_pattern(part)).collect();
    let folder = match fixed.join("/") {
        empty if empty.is_empty() && pattern.starts_with('/') => "/".to_owned(),
        empty if empty.is_empty() => ".".to_owned(),
        folder => folder,
    };
    let rest: Vec<&str> = pattern.split('/').skip(fixed.len()).collect();
    let paths = list(Path::new(&folder))?;
    let found = matching(&rest.join("/"), &paths).map_err(|p| SourceError::not_available(pattern, p))?;
    if found.is_empty() {
        return Err(SourceError::not_available(pattern, format!("no file in {folder} matches the pattern")));
    }
    super::file_format::check_one_kind(&found).map_err(|p| SourceError::not_available(pattern, p))?;
    Ok(found.iter().map(|path| Path::new(&folder).join(path)).collect())
}

/// Describes a missing path and suggests a similar name in its folder.
fn missing(path: &Path) -> String {
    if std::fs::symlink_metadata(path).is_ok() {
        return "it is a dangling link".into();
    }
    if std::fs::read_dir(folder_of(path)).is_err() {
        return format!("there is no folder {}{}", folder_of(path).display(), start_of(path));
    }
    match near_sibling(path) {
        Some(other) => format!("there is no such file or folder; did you mean {}?", other.display()),
        None => format!("there is no such file or folder{}", start_of(path)),
    }
}

/// Returns the folder at which a relative path starts, as the end of a message.
fn start_of(path: &Path) -> String {
    match std::env::current_dir() {
        Ok(here) if path.is_relative() => format!("; relative paths start at the current folder, {}", here.display()),
        _ => String::new(),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."))
}

/// Returns the existing file or folder with the most similar name.
pub(crate) fn near_sibling(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_string_lossy().into_owned();
    let entries = std::fs::read_dir(folder_of(path)).ok()?.flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let other = nearest(&name, names)?;
    Some(path.with_file_name(other))
}
