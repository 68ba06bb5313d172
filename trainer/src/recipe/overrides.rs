//! `key.sub=value` arguments. Each is written into the tree of the recipe before decoding.

use super::deprecated::{OldName, rename_path};
use super::error::Fault;
use super::keys::is_key;
use super::node::{RecipeEntry, RecipeLocation, RecipeNode, RecipeValue, parse_at};

/// Maps in which null is a value.
const NULL_IS_A_VALUE: [&str; 4] =
    ["model.config", "model.hf_config_kwargs", "tokenizer.chat_template_kwargs", "eval.gen_kwargs"];

/// Returns true if null removes the key, such as `data.max_length`. False in maps in which null is a value.
pub(super) fn null_removes(key: &str) -> bool {
    !NULL_IS_A_VALUE.iter().any(|map| key.starts_with(&format!("{map}.")))
}

/// One parsed argument.
struct Override<'a> {
    path: Vec<&'a str>,
    value: RecipeNode,
    location: RecipeLocation,
    old_name: Option<OldName>,
}

/// Writes all arguments into the tree, in their order. `key=null` removes a key. Returns the deprecated names of keys.
pub(super) fn apply_all(root: &mut RecipeNode, arguments: &[String]) -> Result<Vec<OldName>, Fault> {
    let mut written: Vec<Vec<String>> = Vec::with_capacity(arguments.len());
    let mut old_names = Vec::new();
    for (idx, argument) in arguments.iter().enumerate() {
        let mut this = Override::parse(argument, idx)?;
        old_names.extend(this.old_name.take());
        let path = canonical(&this.path);
        if let Some(earlier) = written.iter().position(|earlier| earlier.starts_with(&path)) {
            return Err(this.refuse(&arguments[earlier], written[earlier] == path));
        }
        this.apply(root)?;
        written.push(path);
    }
    Ok(old_names)
}

impl<'a> Override<'a> {
    fn parse(argument: &'a str, idx: usize) -> Result<Self, Fault> {
        let location = RecipeLocation::Argument(idx);
        let Some((path, text)) = argument.split_once('=') else {
            return Err(Fault::new(Some(location), "expected `key=value`, such as `optimizer.lr=1e-4`"));
        };
        let mut path: Vec<&str> = path.trim().split('.').collect();
        if path.iter().any(|segment| segment.is_empty()) {
            return Err(Fault::new(Some(location), "the key has an empty part; parts are separated by single dots"));
        }
        if path[0] == "base" {
            let fault = Fault::new(Some(location), "base: an argument cannot include a recipe");
            return Err(fault.note("set `base` in the recipe file; arguments override keys of the base, too"));
        }
        let old_name = rename_path(&mut path, location);
        if text.trim().is_empty() {
            let key = path.join(".");
            let fault = Fault::new(Some(location), format!("{key}: expected a value, found nothing"));
            return Err(fault.note(format!("`{key}=null` removes the key; a shell variable may be empty")));
        }
        let value = parse_at(text, |_| location).map_err(|error| {
            Fault::new(Some(location), format!("the value is not YAML: {}", error.message))
                .note("quote text with special characters, for YAML and for the shell: 'key=\"a: b\"'")
        })?;
        Ok(Self { path, value, location, old_name })
    }

    fn apply(self, root: &mut RecipeNode) -> Result<(), Fault> {
        let key = self.path.join(".");
        let removes = self.value.value == RecipeValue::Null && null_removes(&key);
        // The decoder reports an unknown key.
        if removes && (remove(root, &self.path, 0) || is_key(&key)) {
            return Ok(());
        }
        set(root, &self.path, 0, self.value, self.location)
    }

    /// Reports that two arguments set the same key.
    fn refuse(&self, earlier: &str, is_same: bool) -> Fault {
        let key = self.path.join(".");
        let (message, advice) = match is_same {
            true => (format!("{key} is set twice, first in `{earlier}`"), "keep one of them"),
            false => (format!("{key} replaces the map in which `{earlier}` sets a key"), "write this argument first"),
        };
        Fault::new(Some(self.location), message).note(advice)
    }
}

/// Returns the path without aliases, and with the index of a single checkpoint.
pub(super) fn canonical(path: &[&str]) -> Vec<String> {
    let name = |depth: usize| match (&path[..depth], path[depth]) {
        (["optimizer" | "scheduler"], "lr") => "learning_rate",
        (["scheduler"], "num_warmup_steps") => "warmup_steps",
        (_, name) => name,
    };
    let mut names: Vec<String> = (0..path.len()).map(|depth| name(depth).to_owned()).collect();
    if path.len() > 1 && path[0] == "checkpoint" && as_index(path[1]).is_none() {
        names.insert(1, "0".to_owned());
    }
    names
}

/// Removes the node at `path[depth..]`. Returns true if it existed.
fn remove(node: &mut RecipeNode, path: &[&str], depth: usize) -> bool {
    let (segment, is_last) = (path[depth], depth + 1 == path.len());
    match &mut node.value {
        RecipeValue::Map(entries) => {
            let alias = alias_of(path, depth);
            let is_meant = |entry: &RecipeEntry| entry.key == segment || alias == Some(entry.key.as_str());
            let Some(idx) = entries.iter().position(is_meant) else { return false };
            if is_last {
                entries.remove(idx);
                return true;
            }
            remove(&mut entries[idx].node, path, depth + 1)
        }
        RecipeValue::List(items) if !is_last => {
            let item = as_index(segment).and_then(|idx| items.get_mut(idx));
            item.is_some_and(|item| remove(item, path, depth + 1))
        }
        _ => false,
    }
}

/// Sets the node at `path[depth..]` to `value`, and creates missing maps.
fn set(
    node: &mut RecipeNode,
    path: &[&str],
    depth: usize,
    value: RecipeNode,
    location: RecipeLocation,
) -> Result<(), Fault> {
    let Some(segment) = path.get(depth).copied() else {
        *node = value;
        return Ok(());
    };
    make_container(node, path, depth, location);
    match &mut node.value {
        RecipeValue::Map(entries) => {
            let child = child(entries, segment, path, depth, location);
            set(child, path, depth + 1, value, location)
        }
        RecipeValue::List(items) => {
            let idx = index(segment, items.len(), &path[..depth], location)?;
            if idx == items.len() {
                items.push(RecipeNode { value: RecipeValue::Null, place: location });
            }
            set(&mut items[idx], path, depth + 1, value, location)
        }
        _ => {
            let (parent, found) = (path[..depth].join("."), node.describe());
            Err(Fault::new(Some(location), format!("`{parent}` has no keys: it is {found}")))
        }
    }
}

/// Converts a node so that it can have keys: null, a source's name, or a single checkpoint.
fn make_container(node: &mut RecipeNode, path: &[&str], depth: usize, location: RecipeLocation) {
    let is_index = as_index(path[depth]).is_some();
    let node_location = node.place;
    match (&mut node.value, path[..depth].to_vec().as_slice()) {
        (RecipeValue::Null, _) => {
            let value = if is_index { RecipeValue::List(Vec::new()) } else { RecipeValue::Map(Vec::new()) };
            *node = RecipeNode { value, place: location };
        }
        (RecipeValue::Text(name), ["data", "sources" | "eval_sources", _]) => {
            let value = RecipeValue::Text(std::mem::take(name));
            let name = RecipeEntry {
                key: "name_or_path".into(),
                place: node_location,
                node: RecipeNode { value, place: node_location },
            };
            node.value = RecipeValue::Map(vec![name]);
        }
        (RecipeValue::Map(entries), ["checkpoint"]) if is_index => {
            let only = RecipeNode { value: RecipeValue::Map(std::mem::take(entries)), place: node_location };
            node.value = RecipeValue::List(vec![only]);
        }
        _ => {}
    }
}

fn child<'a>(
    entries: &'a mut Vec<RecipeEntry>,
    segment: &str,
    path: &[&str],
    depth: usize,
    location: RecipeLocation,
) -> &'a mut RecipeNode {
    let alias = alias_of(path, depth);
    let found = entries.iter().position(|entry| entry.key == segment || alias == Some(entry.key.as_str()));
    let idx = found.unwrap_or_else(|| {
        entries.push(RecipeEntry {
            key: segment.to_owned(),
            place: location,
            node: RecipeNode { value: RecipeValue::Null, place: location },
        });
        entries.len() - 1
    });
    let entry = &mut entries[idx];
    if depth + 1 == path.len() {
        entry.key = segment.to_owned();
        entry.place = location;
    }
    &mut entry.node
}

/// Returns the alias of a key, which an argument or an including recipe replaces too.
pub(super) fn alias_of<'a>(path: &[&'a str], depth: usize) -> Option<&'a str> {
    match (path[..depth].to_vec().as_slice(), path[depth]) {
        (["optimizer" | "scheduler"], "lr") => Some("learning_rate"),
        (["optimizer" | "scheduler"], "learning_rate") => Some("lr"),
        (["scheduler"], "warmup_steps") => Some("num_warmup_steps"),
        (["scheduler"], "num_warmup_steps") => Some("warmup_steps"),
        _ => None,
    }
}

fn index(segment: &str, len: usize, parent: &[&str], location: RecipeLocation) -> Result<usize, Fault> {
    let parent = parent.join(".");
    match as_index(segment) {
        Some(idx) if idx <= len => Ok(idx),
        Some(_) => {
            let message = format!("`{parent}` has {len} items: use an index from 0 to {len} ({len} adds one)");
            Err(Fault::new(Some(location), message))
        }
        None => {
            let advice = match segment.parse::<usize>() {
                Ok(idx) => format!("write {parent}.{idx}"),
                Err(_) => format!("for example {parent}.0.{segment}=…"),
            };
            Err(Fault::new(Some(location), format!("`{parent}` is a list: expected an index, found `{segment}`"))
                .note(advice))
        }
    }
}

/// Parses an index. `00` and `+0` are refused: they would be aliases of `0`.
fn as_index(segment: &str) -> Option<usize> {
    segment.parse().ok().filter(|idx: &usize| idx.to_string() == segment)
}
