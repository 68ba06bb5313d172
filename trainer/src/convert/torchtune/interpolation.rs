//! Interpolation of OmegaConf: `${output_dir}/logs`.

use std::convert::Infallible;

use crate::recipe::{RecipeNode, RecipeValue};

/// The deepest chain of references.
const MAX_DEPTH: usize = 8;

/// Replaces `${key}` by the value of the key. Unknown keys stay.
pub(in crate::convert) fn interpolated(root: &RecipeNode) -> RecipeNode {
    let mut tree = root.clone();
    for _ in 0..MAX_DEPTH {
        let values = tree.clone();
        let Ok(next) = tree.try_map(&|place| place, &|node| Ok::<_, Infallible>(replaced(node, &values)));
        if next == values {
            return next;
        }
        tree = next;
    }
    tree
}

fn replaced(node: RecipeNode, values: &RecipeNode) -> RecipeNode {
    let RecipeValue::Text(text) = &node.value else { return node };
    let Some((before, rest)) = text.split_once("${") else { return node };
    let Some((key, after)) = rest.split_once('}') else { return node };
    let Some((found, _)) = values.at(key.trim()) else { return node };
    let value = match (&found.value, before.is_empty() && after.is_empty()) {
        (value, true) => value.clone(),
        (RecipeValue::Text(found), false) => RecipeValue::Text(format!("{before}{found}{after}")),
        (RecipeValue::Int(found), false) => RecipeValue::Text(format!("{before}{found}{after}")),
        _ => return node,
    };
    RecipeNode { value, place: node.place }
}
