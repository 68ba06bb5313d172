//! A recipe as a YAML tree in which every key and value has its place.
//!
//! The recipe types are decoded from this tree and not from the text, so that a recipe file and the
//! `key=value` arguments obey the same rules and every later complaint can name its place.

use std::convert::Infallible;

use candlewick_text::yaml::{self, YamlSpan};
use serde_saphyr::{DuplicateKeyPolicy, NonFiniteFloatPolicy};

pub(crate) use candlewick_text::yaml::{YamlSyntaxError, quoted};

/// The place of a key or value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecipeLocation {
    /// In the recipe file. Lines and columns count from one, `len` is in characters.
    File {
        /// Line.
        line: usize,
        /// Column, in characters.
        column: usize,
        /// Length of the text, in characters; 0 if unknown.
        len: usize,
    },
    /// In the `key=value` argument of this index.
    Argument(usize),
}

/// A value of a recipe. Scalars are typed by YAML 1.2, except that `yes`, `no`, `on` and `off` stay text.
pub type RecipeNode = yaml::YamlNode<RecipeLocation>;

/// A YAML value of a recipe.
pub type RecipeValue = yaml::YamlValue<RecipeLocation>;

/// One key of a map in a recipe.
pub type RecipeEntry = yaml::YamlEntry<RecipeLocation>;

/// Reads one YAML document of a recipe file. An empty one is `Null`.
pub(crate) fn parse(text: &str) -> Result<RecipeNode, YamlSyntaxError> {
    parse_at(text, |YamlSpan { line, column, len }| RecipeLocation::File { line, column, len })
}

/// Reads one YAML document whose parts are at the places that `location` returns.
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

/// Removes a tag: it has no meaning in a recipe.
fn untagged(node: RecipeNode) -> RecipeNode {
    match node.value {
        RecipeValue::Tagged(_, node) => *node,
        _ => node,
    }
}

/// Returns the parser's message in the words of recipes.
fn plain(message: String) -> String {
    if message.starts_with("multiple YAML documents") {
        return "a second document begins: a recipe is one YAML document, without `---` inside".into();
    }
    match message.strip_prefix("duplicate mapping key: ").and_then(|rest| rest.split(',').next()) {
        Some(key) => format!("duplicate key `{key}`: it was already given in the same map"),
        None => message,
    }
}
