//! `key.sub=value` arguments: each is written into the tree of the recipe, where it obeys the recipe's rules.

use super::error::Fault;
use super::node::{Entry, Mark, Node, Value};

/// Writes the argument of index `idx` into the tree.
pub(super) fn apply(root: &mut Node, argument: &str, idx: usize) -> Result<(), Fault> {
    let mark = Mark::Argument(idx);
    let Some((path, text)) = argument.split_once('=') else {
        return Err(Fault::new(Some(mark), "expected `key=value`, such as `optimizer.lr=1e-4`"));
    };
    let path: Vec<&str> = path.trim().split('.').collect();
    if path.iter().any(|segment| segment.is_empty()) {
        return Err(Fault::new(Some(mark), "the key has an empty part; parts are joined by single points"));
    }
    let value = Node::parse(text).map_err(|error| {
        Fault::new(Some(mark), format!("the value is not YAML: {}", error.message))
            .note("put texts with special characters into quotes, for YAML and for the shell: 'key=\"a: b\"'")
    })?;
    set(root, &path, 0, value.marked(mark), mark)
}

/// Descends along `path[depth..]`, creating maps on the way, and puts `value` there.
fn set(node: &mut Node, path: &[&str], depth: usize, value: Node, mark: Mark) -> Result<(), Fault> {
    let Some(segment) = path.get(depth).copied() else {
        *node = value;
        return Ok(());
    };
    open(node, path, depth, mark);
    match &mut node.value {
        Value::Map(entries) => {
            let child = child(entries, segment, path, depth, mark);
            set(child, path, depth + 1, value, mark)
        }
        Value::List(items) => {
            let idx = index(segment, items.len(), &path[..depth], mark)?;
            if idx == items.len() {
                items.push(Node { value: Value::Null, mark });
            }
            set(&mut items[idx], path, depth + 1, value, mark)
        }
        _ => {
            let (parent, found) = (path[..depth].join("."), node.describe());
            Err(Fault::new(Some(mark), format!("`{parent}` has no keys: it is {found}")))
        }
    }
}

/// Turns what can have keys into a map or a list: nothing, a source's name, a single checkpoint.
fn open(node: &mut Node, path: &[&str], depth: usize, mark: Mark) {
    let is_index = path[depth].parse::<usize>().is_ok();
    let node_mark = node.mark;
    match (&mut node.value, path[..depth].to_vec().as_slice()) {
        (Value::Null, _) => {
            let value = if is_index { Value::List(Vec::new()) } else { Value::Map(Vec::new()) };
            *node = Node { value, mark };
        }
        (Value::Str(name), ["data", "sources" | "eval_sources", _]) => {
            let value = Value::Str(std::mem::take(name));
            let name = Entry { key: "name_or_path".into(), mark: node_mark, node: Node { value, mark: node_mark } };
            node.value = Value::Map(vec![name]);
        }
        (Value::Map(entries), ["checkpoint"]) if is_index => {
            let only = Node { value: Value::Map(std::mem::take(entries)), mark: node_mark };
            node.value = Value::List(vec![only]);
        }
        _ => {}
    }
}

fn child<'a>(entries: &'a mut Vec<Entry>, segment: &str, path: &[&str], depth: usize, mark: Mark) -> &'a mut Node {
    let second = second_name(path, depth);
    let found = entries.iter().position(|entry| entry.key == segment || second == Some(entry.key.as_str()));
    let idx = found.unwrap_or_else(|| {
        entries.push(Entry { key: segment.to_owned(), mark, node: Node { value: Value::Null, mark } });
        entries.len() - 1
    });
    let entry = &mut entries[idx];
    if depth + 1 == path.len() {
        entry.key = segment.to_owned();
        entry.mark = mark;
    }
    &mut entry.node
}

/// A key that means the same, so that an argument replaces it.
fn second_name<'a>(path: &[&'a str], depth: usize) -> Option<&'a str> {
    match (path[..depth].to_vec().as_slice(), path[depth]) {
        (["optimizer" | "scheduler"], "lr") => Some("learning_rate"),
        (["optimizer" | "scheduler"], "learning_rate") => Some("lr"),
        (["scheduler"], "warmup_steps") => Some("num_warmup_steps"),
        (["scheduler"], "num_warmup_steps") => Some("warmup_steps"),
        _ => None,
    }
}

fn index(segment: &str, len: usize, parent: &[&str], mark: Mark) -> Result<usize, Fault> {
    let parent = parent.join(".");
    match segment.parse::<usize>() {
        Ok(idx) if idx <= len => Ok(idx),
        Ok(_) => {
            let message = format!("`{parent}` has {len} items: use an index from 0 to {len} ({len} adds one)");
            Err(Fault::new(Some(mark), message))
        }
        Err(_) => Err(Fault::new(Some(mark), format!("`{parent}` is a list: expected an index, found `{segment}`"))
            .note(format!("for example {parent}.0.{segment}=…"))),
    }
}
