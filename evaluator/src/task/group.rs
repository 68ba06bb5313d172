//! Groups: tasks under one name, with scores over all of them.

use serde_json::{Map, Value as Json};

use super::error::ConfigError;
use super::keys::YamlMap;
use super::yaml::Node;

/// A group with the names of what it holds.
#[derive(Clone, Debug)]
pub struct TaskGroup {
    /// Name.
    pub name: String,
    /// Its name in tables.
    pub alias: Option<String>,
    /// Tasks and groups in it, in order.
    pub children: Vec<String>,
    /// All tasks in it and in its groups, in order.
    pub tasks: Vec<String>,
    /// The scores over its tasks; empty if it is only a name for them.
    pub aggregates: Vec<GroupAggregate>,
    /// `metadata.version` as text, or "N/A".
    pub version: String,
}

/// A score over the tasks of a group: a mean.
#[derive(Clone, Debug)]
pub struct GroupAggregate {
    /// The metric.
    pub metric: String,
    /// The filters whose scores are put together, each by itself; all that there are if `None`.
    pub filters: Option<Vec<String>>,
    /// Whether a task counts as often as it has documents.
    pub weight_by_size: bool,
}

/// The keys of a group that are not passed on to its tasks.
pub(crate) const GROUP_KEYS: [&str; 6] = ["group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag"];

impl TaskGroup {
    /// Reads the group's own keys. What it holds is found by the registry.
    pub(crate) fn read(node: &Node, name: &str) -> Result<Self, ConfigError> {
        let keys = YamlMap::open(node, "a group")?;
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
    fn read(node: &Node) -> Result<Self, ConfigError> {
        const KEYS: [&str; 4] = ["metric", "filter_list", "aggregation", "weight_by_size"];
        let keys = YamlMap::new(node, "an entry of aggregate_metric_list", &KEYS)?;
        match keys.text("aggregation")?.as_deref() {
            None | Some("mean") => {}
            Some(other) => {
                return Err(keys.fault(format!("aggregation: a group is put together by mean, not by {other:?}")));
            }
        }
        Ok(Self {
            metric: keys.required_text("metric")?,
            filters: keys.texts("filter_list")?,
            weight_by_size: keys.flag("weight_by_size", true)?,
        })
    }
}
