//! Groups of tasks with aggregate scores.

use serde_json::{Map, Value as Json};

use super::error::ConfigError;
use super::keys::YamlMap;
use super::yaml::TaskNode;

/// Group of tasks and subgroups.
#[derive(Clone, Debug)]
pub struct TaskGroup {
    /// Group name.
    pub name: String,
    /// Display name in tables, if it differs from the name.
    pub alias: Option<String>,
    /// Names of the direct members, tasks and subgroups, in order.
    pub children: Vec<String>,
    /// Names of all tasks, including those of subgroups, in order.
    pub tasks: Vec<String>,
    /// Scores over the group's tasks; empty for a group without aggregate scores.
    pub aggregates: Vec<GroupAggregate>,
    /// `metadata.version` as text, or "N/A".
    pub version: String,
}

/// Entry of `aggregate_metric_list`: the mean of a metric over a group's tasks.
#[derive(Clone, Debug)]
pub struct GroupAggregate {
    /// Metric name.
    pub metric: String,
    /// Filters that are aggregated, each separately; `None` for all filters of the tasks.
    pub filters: Option<Vec<String>>,
    /// True if each task is weighted by its number of documents.
    pub weight_by_size: bool,
}

/// Keys of a group that its members do not inherit.
pub(crate) const GROUP_KEYS: [&str; 6] = ["group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag"];

impl TaskGroup {
    /// Reads the group's own keys. The registry resolves its members.
    pub(crate) fn read(node: &TaskNode, name: &str) -> Result<Self, ConfigError> {
        let keys = YamlMap::with_any_keys(node, "a group")?;
        let aggregates = match keys.get("aggregate_metric_list").map(|entry| &entry.node) {
            None => Vec::new(),
            Some(node) => match keys.list("aggregate_metric_list") {
                Ok(items) => items.unwrap_or_default().iter().map(GroupAggregate::read).collect::<Result<_, _>>()?,
                Err(_) => vec![GroupAggregate::read(node)?],
            },
        };
        let version = keys.map("metadata")?.and_then(|metadata: Map<String, Json>| metadata.get("version").cloned());
        Ok(Self {
            name: name.to_owned(),
            alias: keys.text("group_alias")?,
            children: Vec::new(),
            tasks: Vec::new(),
            aggregates,
            version: version.map_or_else(|| "N/A".into(), |version| super::python::repr::str(&version)),
        })
    }
}

impl GroupAggregate {
    fn read(node: &TaskNode) -> Result<Self, ConfigError> {
        const KEYS: [&str; 4] = ["metric", "filter_list", "aggregation", "weight_by_size"];
        let keys = YamlMap::new(node, "an entry of aggregate_metric_list", &KEYS)?;
        match keys.text("aggregation")?.as_deref() {
            None | Some("mean") => {}
            Some(other) => {
                return Err(keys.error(format!("aggregation: groups support only mean, found {other:?}")));
            }
        }
        Ok(Self {
            metric: keys.required_text("metric")?,
            filters: keys.texts("filter_list")?,
            weight_by_size: keys.flag("weight_by_size", true)?,
        })
    }
}
