//! Registry of tasks, groups and tags, and resolution of their names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candlewick_text::suggestion::did_you_mean;
use globset::GlobBuilder;

use super::config::TaskConfig;
use super::error::{ConfigError, SourceLocation, TaskError};
use super::group::{GROUP_KEYS, TaskGroup};
use super::keys::YamlMap;
use super::load::{built_in, from_path, set_key};
use super::yaml::{TaskEntry, TaskNode, TaskValue};

/// Registry of tasks, groups and tags by name, as lm-eval's `TaskManager`.
#[derive(Debug)]
pub struct TaskRegistry {
    known: BTreeMap<String, RegistryEntry>,
    tags: BTreeMap<String, Vec<String>>,
    load_errors: Vec<TaskError>,
    /// Names defined twice in one folder, with both locations.
    duplicates: BTreeMap<String, [SourceLocation; 2]>,
}

#[derive(Clone, Debug)]
enum RegistryEntry {
    Task(TaskNode),
    Group(TaskNode),
}

/// Task, group or tag in the output of `evaluator ls`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct TaskListing {
    /// Name of the task, group or tag.
    pub name: String,
    /// File that defines it; `None` for a tag.
    pub file: Option<PathBuf>,
    /// Output type of a task; `None` for a group or tag.
    pub output_type: Option<String>,
    /// Members of a group or tag.
    #[serde(rename = "holds")]
    pub members: Vec<String>,
}

/// Tasks selected by name, without duplicates, and the groups that contain them.
#[derive(Clone, Debug, Default)]
pub struct TaskSelection {
    /// Selected tasks, in the order of selection.
    pub tasks: Vec<TaskConfig>,
    /// Groups that contain selected tasks, in the order of selection.
    pub groups: Vec<TaskGroup>,
}

/// Maximum nesting depth of groups.
const MAX_DEPTH: usize = 16;

impl TaskRegistry {
    /// Loads the built-in tasks and those of `include_paths`. Later paths override earlier ones.
    pub fn load(include_paths: &[PathBuf]) -> Result<Self, TaskError> {
        let mut registry = Self {
            known: BTreeMap::new(),
            tags: BTreeMap::new(),
            load_errors: Vec::new(),
            duplicates: BTreeMap::new(),
        };
        registry.add(built_in()?)?;
        for path in include_paths {
            let loaded = from_path(path)?;
            registry.load_errors.extend(loaded.load_errors);
            registry.find_duplicates(&loaded.nodes);
            registry.add(loaded.nodes)?;
        }
        Ok(registry)
    }

    /// Returns all tasks, ordered by name.
    pub fn tasks(&self) -> Vec<TaskListing> {
        let tasks = self.known.iter().filter_map(|(name, known)| match known {
            RegistryEntry::Task(node) => Some((name, node)),
            RegistryEntry::Group(_) => None,
        });
        let output = |node: &TaskNode| node.get("output_type").map(|entry| entry.node.text_or_empty().to_owned());
        let listed = |(name, node): (&String, &TaskNode)| TaskListing {
            output_type: Some(output(node).unwrap_or_else(|| "generate_until".into())),
            ..listed(name, Some(node), Vec::new())
        };
        tasks.map(listed).collect()
    }

    /// Returns all groups, ordered by name.
    pub fn groups(&self) -> Vec<TaskListing> {
        let groups = self.known.iter().filter_map(|(name, known)| match known {
            RegistryEntry::Group(node) => {
                Some(listed(name, Some(node), members(node).iter().filter_map(name_of).collect()))
            }
            RegistryEntry::Task(_) => None,
        });
        groups.collect()
    }

    /// Returns all tags, ordered by name.
    pub fn tags(&self) -> Vec<TaskListing> {
        self.tags.iter().map(|(name, tasks)| listed(name, None, tasks.clone())).collect()
    }

    /// Returns the errors of unreadable files in included folders.
    pub fn load_errors(&self) -> &[TaskError] {
        &self.load_errors
    }

    /// Selects tasks by comma-separated names: tasks, groups, tags, patterns such as `mmlu_*`, and files.
    pub fn select(&self, names: &str) -> Result<TaskSelection, TaskError> {
        let mut built = SelectionBuilder::default();
        let mut wanted: Vec<String> = Vec::new();
        for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            wanted.extend(self.expand(name)?.into_iter().filter(|name| !wanted.contains(name)).collect::<Vec<_>>());
        }
        for name in wanted {
            built.source = name.clone();
            match self.file(&name)? {
                Some(file) => file.select_into(&mut built)?,
                None => self.build(&name, &[], &mut built, MAX_DEPTH).map(|_| ())?,
            }
        }
        if built.tasks.is_empty() {
            return Err(TaskError::Selection("no task was named; `evaluator ls tasks` lists them".into()));
        }
        Ok(TaskSelection { tasks: built.tasks, groups: built.groups })
    }

    fn add(&mut self, nodes: Vec<TaskNode>) -> Result<(), TaskError> {
        for node in nodes {
            let Some((name, is_group)) = given_name(&node) else {
                let fault = ConfigError::at(node.place.clone(), "the key `task` or `group` is missing");
                self.load_errors.push(fault.into());
                continue;
            };
            if is_group {
                self.known.insert(name, RegistryEntry::Group(node));
                continue;
            }
            for tag in tags(&node) {
                let tagged = self.tags.entry(tag).or_default();
                if !tagged.contains(&name) {
                    tagged.push(name.clone());
                    tagged.sort();
                }
            }
            self.known.insert(name, RegistryEntry::Task(node));
        }
        Ok(())
    }

    /// Records names defined twice in one folder. Only another folder may override a task.
    fn find_duplicates(&mut self, nodes: &[TaskNode]) {
        let mut seen: BTreeMap<String, &SourceLocation> = BTreeMap::new();
        for node in nodes {
            let Some((name, _)) = given_name(node) else { continue };
            match seen.insert(name.clone(), &node.place) {
                Some(first) if !is_one_place(first, &node.place) => {
                    self.duplicates.insert(name, [first.clone(), node.place.clone()]);
                }
                Some(_) => {}
                None => _ = self.duplicates.remove(&name),
            }
        }
    }

    /// Returns an error for a name defined twice in one folder.
    fn refuse_duplicate(&self, name: &str) -> Result<(), TaskError> {
        let Some([first, second]) = self.duplicates.get(name) else { return Ok(()) };
        let message = format!("{name} is defined twice, first in {}; rename one of them", first.file.display());
        Err(ConfigError::at(second.clone(), message).into())
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.known.keys().chain(self.tags.keys()).map(String::as_str)
    }

    /// Expands a pattern to task names, else group names, else tags. A plain name is returned unchanged.
    fn expand(&self, name: &str) -> Result<Vec<String>, TaskError> {
        if !name.contains(['*', '?', '[']) {
            return Ok(vec![name.to_owned()]);
        }
        let bad = |error: globset::Error| TaskError::Selection(format!("{name:?} is not a pattern: {}", error.kind()));
        let pattern = GlobBuilder::new(name).build().map_err(bad)?.compile_matcher();
        let tasks =
            self.known.iter().filter(|(_, known)| matches!(known, RegistryEntry::Task(_))).map(|(name, _)| name);
        let groups =
            self.known.iter().filter(|(_, known)| matches!(known, RegistryEntry::Group(_))).map(|(name, _)| name);
        let matching = |names: &mut dyn Iterator<Item = &String>| -> Vec<String> {
            names.filter(|name| pattern.is_match(name)).cloned().collect()
        };
        let mut found = matching(&mut { tasks });
        if found.is_empty() {
            found = matching(&mut { groups });
        }
        if found.is_empty() {
            found = matching(&mut self.tags.keys());
        }
        if found.is_empty() {
            return Err(TaskError::Unknown(format!("a task for the pattern {name:?}; `evaluator ls tasks` lists all")));
        }
        Ok(found)
    }

    /// Loads a task file on top of this registry.
    fn file(&self, name: &str) -> Result<Option<FileTasks<'_>>, TaskError> {
        let path = Path::new(name);
        if self.known.contains_key(name) || self.tags.contains_key(name) || !path.is_file() {
            return Ok(None);
        }
        Ok(Some(FileTasks { registry: self, nodes: from_path(path)?.nodes }))
    }

    /// Builds the tasks of a name, and returns the top-level names.
    fn build(
        &self,
        name: &str,
        overrides: &[TaskEntry],
        built: &mut SelectionBuilder,
        depth: usize,
    ) -> Result<Vec<String>, TaskError> {
        self.refuse_duplicate(name)?;
        match self.known.get(name) {
            Some(RegistryEntry::Task(node)) => self.task(node, overrides, built).map(|name| vec![name]),
            Some(RegistryEntry::Group(node)) => {
                self.group(node, name, overrides, built, depth).map(|()| vec![name.to_owned()])
            }
            None => match self.tags.get(name) {
                Some(tasks) => {
                    let mut names = Vec::new();
                    for task in tasks {
                        names.extend(self.build(task, overrides, built, depth)?);
                    }
                    Ok(names)
                }
                None => Err(self.unknown(name)),
            },
        }
    }

    fn task(
        &self,
        node: &TaskNode,
        overrides: &[TaskEntry],
        built: &mut SelectionBuilder,
    ) -> Result<String, TaskError> {
        let config = TaskConfig::read(&merged(node, overrides))?;
        let name = config.task.clone();
        built.add(config)?;
        Ok(name)
    }

    fn group(
        &self,
        node: &TaskNode,
        name: &str,
        overrides: &[TaskEntry],
        built: &mut SelectionBuilder,
        depth: usize,
    ) -> Result<(), TaskError> {
        if depth == 0 {
            return Err(ConfigError::at(node.place.clone(), format!("the group {name} contains itself")).into());
        }
        let mut group = TaskGroup::read(node, name)?;
        let at = built.groups.len();
        built.groups.push(group.clone());
        let passed_on =
            YamlMap::with_any_keys(node, "a group")?.entries().iter().filter(|e| !GROUP_KEYS.contains(&e.key.as_str()));
        let mut inherited: Vec<TaskEntry> = passed_on.cloned().collect();
        overrides.iter().cloned().for_each(|entry| set_key(&mut inherited, entry));
        for member in members(node) {
            for child in self.member(member, name, &inherited, built, depth)? {
                match built.groups.iter().find(|group| group.name == child) {
                    Some(inner) => group.tasks.extend(inner.tasks.iter().cloned()),
                    None => group.tasks.push(child.clone()),
                }
                group.children.push(child);
            }
        }
        built.groups[at] = group;
        Ok(())
    }

    /// Builds a group member: a name, a name with overrides, or a full configuration.
    fn member(
        &self,
        member: &TaskNode,
        group: &str,
        inherited: &[TaskEntry],
        built: &mut SelectionBuilder,
        depth: usize,
    ) -> Result<Vec<String>, TaskError> {
        let TaskValue::Map(own) = &member.value else {
            let name = name_of(member)
                .ok_or_else(|| ConfigError::at(member.place.clone(), "a member of a group is a name or a map"))?;
            return self.build(&name, inherited, built, depth - 1);
        };
        let own_key = |key: &str| member.get(key).and_then(|entry| name_of(&entry.node));
        let mut entries = inherited.to_vec();
        if let Some(name) = own_key("group") {
            if !self.known.contains_key(&name) {
                let name = format!("{group}::{name}");
                return self.group(member, &name, inherited, built, depth - 1).map(|()| vec![name]);
            }
            own.iter().filter(|entry| entry.key != "group").cloned().for_each(|entry| set_key(&mut entries, entry));
            return self.build(&name, &entries, built, depth - 1);
        }
        let missing = || ConfigError::at(member.place.clone(), "a member of a group needs the key `task` or `group`");
        let name = own_key("task").ok_or_else(missing)?;
        own.iter().cloned().for_each(|entry| set_key(&mut entries, entry));
        if self.known.contains_key(&name) || self.tags.contains_key(&name) {
            entries.retain(|entry| entry.key != "task");
            return self.build(&name, &entries, built, depth - 1);
        }
        let renamed = TaskNode { value: TaskValue::Text(format!("{group}::{name}")), place: member.place.clone() };
        let new = TaskEntry { key: "task".into(), place: member.place.clone(), node: renamed };
        set_key(&mut entries, new);
        let empty = TaskNode { value: TaskValue::Map(Vec::new()), place: member.place.clone() };
        self.task(&empty, &entries, built).map(|name| vec![name])
    }

    fn unknown(&self, name: &str) -> TaskError {
        let near = did_you_mean(name, self.names());
        let load_errors = match self.load_errors.first() {
            Some(first) => format!("; {} files could not be read, the first: {first}", self.load_errors.len()),
            None => String::new(),
        };
        TaskError::Unknown(format!(
            "the task {name:?}{near}{}{load_errors}",
            if near.is_empty() { "; `evaluator ls tasks` lists all" } else { "" }
        ))
    }
}

/// Tasks of a file that was selected by path.
struct FileTasks<'a> {
    registry: &'a TaskRegistry,
    nodes: Vec<TaskNode>,
}

impl FileTasks<'_> {
    fn select_into(&self, built: &mut SelectionBuilder) -> Result<(), TaskError> {
        for node in &self.nodes {
            match node.get("group").and_then(|entry| name_of(&entry.node)) {
                Some(name) => self.registry.group(node, &name, &[], built, MAX_DEPTH)?,
                None => self.registry.task(node, &[], built).map(|_| ())?,
            }
        }
        Ok(())
    }
}

/// Tasks built so far, with the name that selected each.
#[derive(Default)]
struct SelectionBuilder {
    tasks: Vec<TaskConfig>,
    groups: Vec<TaskGroup>,
    sources: Vec<String>,
    source: String,
}

impl SelectionBuilder {
    /// Adds a task. Two different names must not select it with different settings.
    fn add(&mut self, config: TaskConfig) -> Result<(), TaskError> {
        let Some(at) = self.tasks.iter().position(|task| task.task == config.task) else {
            self.sources.push(self.source.clone());
            self.tasks.push(config);
            return Ok(());
        };
        if self.sources[at] == self.source {
            return Ok(());
        }
        let (name, first, second) = (&config.task, &self.sources[at], &self.source);
        Err(TaskError::Selection(format!(
            "{first} and {second} select the task {name} with different settings; select only one"
        )))
    }
}

fn merged(node: &TaskNode, overrides: &[TaskEntry]) -> TaskNode {
    let mut node = node.clone();
    if let TaskValue::Map(entries) = &mut node.value {
        overrides.iter().cloned().for_each(|entry| set_key(entries, entry));
    }
    node
}

fn listed(name: &str, node: Option<&TaskNode>, members: Vec<String>) -> TaskListing {
    let file = |place: &SourceLocation| place.file.as_ref().clone();
    TaskListing { name: name.to_owned(), file: node.map(|node| file(&node.place)), output_type: None, members }
}

fn members(node: &TaskNode) -> &[TaskNode] {
    match node.get("task").map(|entry| &entry.node) {
        Some(TaskNode { value: TaskValue::List(items), .. }) => items,
        Some(one) if matches!(one.value, TaskValue::Text(_)) => std::slice::from_ref(one),
        _ => &[],
    }
}

/// Returns the name of a member.
fn name_of(node: &TaskNode) -> Option<String> {
    match &node.value {
        TaskValue::Text(text) => Some(text.clone()),
        number @ (TaskValue::Int(_) | TaskValue::Float(_)) => number.number().map(|number| number.to_string()),
        TaskValue::Map(_) => ["task", "group"].into_iter().find_map(|key| name_of(&node.get(key)?.node)),
        _ => None,
    }
}

/// Returns the name of a configuration, and true for a group.
fn given_name(node: &TaskNode) -> Option<(String, bool)> {
    let named = |key: &str| node.get(key).and_then(|entry| name_of(&entry.node));
    let group = named("group").filter(|_| node.get("class").is_none());
    group.map(|name| (name, true)).or_else(|| named("task").map(|name| (name, false)))
}

/// Returns true if both locations are one file.
fn is_one_place(one: &SourceLocation, other: &SourceLocation) -> bool {
    let real = |place: &SourceLocation| (place.file.canonicalize().ok(), place.line);
    one.file == other.file && one.line == other.line || one.file != other.file && real(one) == real(other)
}

fn tags(node: &TaskNode) -> Vec<String> {
    match node.get("tag").map(|entry| &entry.node.value) {
        Some(TaskValue::Text(tag)) => vec![tag.clone()],
        Some(TaskValue::List(items)) => items.iter().map(|item| item.text_or_empty().to_owned()).collect(),
        _ => Vec::new(),
    }
}
