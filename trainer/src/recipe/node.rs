//! A recipe as a YAML tree with the location of every key and value.
//!
//! Recipe types are decoded from this tree. The recipe file and the `key=value` arguments therefore follow the same
//! rules, and every error has a location.

use std::convert::Infallible;

use candlewick_text::yaml::{self, YamlSpan};
use serde_saphyr::{DuplicateKeyPolicy, NonFiniteFloatPolicy};

pub(crate) use candlewick_text::yaml::{YamlSyntaxError, quoted};

/// The location of a key or value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecipeLocation {
    /// In the recipe file or one of its bases.
    File {
        /// The file: 0 is the recipe, 1 its base, 2 the base of that.
        file: usize,
        /// The line, from 1.
        line: usize,
        /// The column in characters, from 1.
        column: usize,
        /// The length in characters; 0 if unknown.
        len: usize,
    },
    /// In the `key=value` argument with this index.
    Argument(usize),
}

/// A value of a recipe with its location. Scalars have their YAML 1.2 types; `yes`, `no`, `on` and `off` are text.
pub type RecipeNode = yaml::YamlNode<RecipeLocation>;

/// A YAML value of a recipe.
pub type RecipeValue = yaml::YamlValue<RecipeLocation>;

/// One key of a map in a recipe.
pub type RecipeEntry = yaml::YamlEntry<RecipeLocation>;

/// Parses one YAML document of a recipe file, whose number is `file`. An empty document is `Null`.
pub(crate) fn parse(text: &str, file: usize) -> Result<RecipeNode, YamlSyntaxError> {
    parse_at(text, |YamlSpan { line, column, len }| RecipeLocation::File { file, line, column, len })
}

/// Parses one YAML document. `location` maps its spans to locations.
pub(crate) fn parse_at(
    text: &str,
    location: impl Fn(YamlSpan) -> RecipeLocation,
) -> Result<RecipeNode, YamlSyntaxError> {
    let options = serde_saphyr::options! {
        duplicate_keys: DuplicateKeyPolicy::Error,
        strict_booleans: true,
        non_finite_float_policy: NonFiniteFloatPolicy::AsString,
        with_snippet: false,
    };
    let tree = yaml::YamlNode::parse::<String>(text, options);
    let tree = tree.map_err(|YamlSyntaxError { message, at }| YamlSyntaxError { message: plain(message), at })?;
    let Ok(tree) = tree.try_map(&location, &|node| Ok::<_, Infallible>(untagged(node)));
    Ok(tree)
}

/// Removes a tag, which has no meaning in a recipe.
fn untagged(node: RecipeNode) -> RecipeNode {
    match node.value {
        RecipeValue::Tagged(_, node) => *node,
        _ => node,
    }
}

/// Translates the parser's message into a recipe's terms.
fn plain(message: String) -> String {
    if message.starts_with("multiple YAML documents") {
        return "a second YAML document starts here; a recipe is one document, without `---` inside".into();
    }
    match message.strip_prefix("duplicate mapping key: ").and_then(|rest| rest.split(',').next()) {
        Some(key) => format!("duplicate key `{key}`: it was already given in the same map"),
        None => message,
    }
}
