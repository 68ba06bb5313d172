//! Dataset card: the YAML front matter of a data set's README, whose `configs` assign files to splits.

use serde::Deserialize;

/// The `configs` of a dataset card.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct DatasetCard {
    #[serde(default)]
    configs: Vec<CardConfig>,
}

/// One configuration (subset) of a data set.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct CardConfig {
    pub(crate) config_name: String,
    #[serde(default)]
    data_files: Option<DataFiles>,
    #[serde(default)]
    pub(crate) data_dir: Option<String>,
    #[serde(default)]
    default: bool,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum DataFiles {
    Pattern(String),
    List(Vec<Item>),
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Item {
    Pattern(String),
    Split { split: String, path: Patterns },
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Patterns {
    One(String),
    Many(Vec<String>),
}

impl DatasetCard {
    /// Parses the YAML front matter between the `---` lines of a README. `None` if it has no `configs`.
    pub fn parse(readme: &str) -> Option<Self> {
        let readme = readme.trim_start_matches('\u{feff}');
        let rest = readme.strip_prefix("---\n").or_else(|| readme.strip_prefix("---\r\n"))?;
        let head = &rest[..rest.find("\n---")?];
        let card: Self = match serde_saphyr::from_str(head) {
            Ok(card) => card,
            Err(error) => {
                tracing::warn!("the README's YAML front matter is ignored: {error}");
                return None;
            }
        };
        (!card.configs.is_empty()).then_some(card)
    }

    /// Returns the configuration of that name, or the default one.
    pub(crate) fn config(&self, name: Option<&str>) -> Result<&CardConfig, String> {
        let names = || {
            let names: Vec<_> = self.configs.iter().map(|c| c.config_name.as_str()).collect();
            names.join(", ")
        };
        let found = match (name, self.configs.as_slice()) {
            (Some(name), configs) => configs.iter().find(|c| c.config_name == name),
            (None, [only]) => Some(only),
            (None, configs) => configs.iter().find(|c| c.default || c.config_name == "default"),
        };
        found.ok_or_else(|| match name {
            Some(name) => format!("it has no configuration {name:?}; there are: {}", names()),
            None => format!("it has several configurations, name one of: {}", names()),
        })
    }
}

impl CardConfig {
    /// Returns the splits with their file patterns. Empty if the card leaves the splits to the file names.
    pub(crate) fn splits(&self) -> Vec<(&str, Vec<&str>)> {
        match &self.data_files {
            None => Vec::new(),
            Some(DataFiles::Pattern(pattern)) => vec![("train", vec![pattern.as_str()])],
            Some(DataFiles::List(items)) => items.iter().map(Item::split).collect(),
        }
    }
}

impl Item {
    fn split(&self) -> (&str, Vec<&str>) {
        match self {
            Self::Pattern(pattern) => ("train", vec![pattern]),
            Self::Split { split, path: Patterns::One(pattern) } => (split, vec![pattern]),
            Self::Split { split, path: Patterns::Many(patterns) } => {
                (split, patterns.iter().map(String::as_str).collect())
            }
        }
    }
}
