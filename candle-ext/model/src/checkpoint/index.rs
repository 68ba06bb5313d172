//! model.safetensors.index.json: shard file of each tensor.

use std::{
    collections::BTreeMap,
    path::{Component, Path},
};

use serde_json::Value;

use crate::{
    ModelError,
    config::json::{parse_object, shorten},
};

/// Parses the shard file of each tensor. File names must be plain names inside the folder.
pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, String>, ModelError> {
    let object = parse_object(path, bytes)?;
    let bad = |problem: String| ModelError::malformed(path, problem);
    let Some(Value::Object(map)) = object.get("weight_map") else {
        return Err(bad("`weight_map` is missing or not an object".to_string()));
    };
    let file = |(name, file): (&String, &Value)| match file.as_str() {
        Some(file) if is_plain(file) => Ok((name.clone(), file.to_string())),
        Some(file) => Err(bad(format!("weight_map.{name}: `{file}` is not the name of a file in this folder"))),
        None => Err(bad(format!("weight_map.{name}: expected a file name, found {}", shorten(file)))),
    };
    map.iter().map(file).collect()
}

fn is_plain(file: &str) -> bool {
    let mut components = Path::new(file).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(name)), None) if name == file)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GOOD: &str =
        r#"{"metadata": {"total_size": 8}, "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}"#;

    #[track_caller]
    fn refused(text: &str, part: &str) {
        let message = parse(Path::new("i.json"), text.as_bytes()).unwrap_err().to_string();
        assert!(message.contains("i.json") && message.contains(part), "`{message}` lacks `{part}`");
    }

    #[test]
    fn names_map_to_files() {
        let map = parse(Path::new("i.json"), GOOD.as_bytes()).unwrap();
        assert_eq!(map["b"], "m-2.safetensors");
    }

    #[test]
    fn a_file_outside_the_folder_is_refused() {
        for file in ["../x", "/etc/passwd", "a/b", "", ".", "..", "./x"] {
            refused(&format!(r#"{{"weight_map": {{"a": "{file}"}}}}"#), "weight_map.a");
        }
    }

    #[test]
    fn broken_indexes_are_named() {
        refused("{\n\"weight_map\": [", "line 2");
        refused("{}", "weight_map");
        refused(r#"{"weight_map": {"a": 3}}"#, "found 3");
    }

    proptest! {
        #[test]
        fn mutated_indexes_never_panic_nor_leave_the_folder(
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = GOOD.as_bytes().to_vec();
            for (at, byte) in edits {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.truncate(cut.index(GOOD.len() * 2));
            if let Ok(map) = parse(Path::new("i.json"), &bytes) {
                prop_assert!(map.values().all(|file| !file.contains('/') && file != ".."));
            }
        }
    }
}
