//! Files of a tokenizer's folder.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json};

use super::TokenizerError;
use crate::files::{MAX_GENERATED_FILE_BYTES, is_present, read_regular_file, without_bom};

/// Chat template with its name (`default`, `tool_use`, ...), its file and its source.
#[derive(Clone, Debug)]
pub(super) struct NamedTemplate {
    pub(super) name: String,
    pub(super) origin: String,
    pub(super) source: String,
}

/// Reads a text file. `None` if it does not exist. Rejects pipes and devices, whose bytes may never end.
pub(super) fn read(path: &Path) -> Result<Option<String>, TokenizerError> {
    match read_regular_file(path, MAX_GENERATED_FILE_BYTES) {
        Ok(bytes) => String::from_utf8(bytes).map(Some).map_err(|error| TokenizerError::InvalidFile {
            path: path.to_owned(),
            message: format!("not UTF-8 at byte {}", error.utf8_error().valid_up_to()),
        }),
        Err(_) if !is_present(path) => Ok(None),
        Err(source) => Err(TokenizerError::Read { path: path.to_owned(), source }),
    }
}

/// Reads a file with a JSON object. Returns an empty object if the file does not exist.
pub(crate) fn read_object(path: &Path) -> Result<Map<String, Json>, TokenizerError> {
    let Some(text) = read(path)? else { return Ok(Map::new()) };
    let content = |message| TokenizerError::InvalidFile { path: path.to_owned(), message };
    match serde_json::from_slice(without_bom(text.as_bytes())) {
        Ok(Json::Object(object)) => Ok(object),
        Ok(_) => Err(content("expected a JSON object".into())),
        Err(error) => Err(content(error.to_string())),
    }
}

/// Reads every chat template of the folder, from the newest storage layout that exists.
///
/// 1. `chat_template.jinja` with `additional_chat_templates/`
/// 2. `chat_template.json`
/// 3. `chat_template` in `tokenizer_config.json`: a string or a list of `{name, template}`
pub(super) fn chat_templates(
    directory: &Path,
    config: &Map<String, Json>,
) -> Result<Vec<NamedTemplate>, TokenizerError> {
    let path = directory.join("chat_template.jinja");
    if let Some(source) = read(&path)? {
        let origin = path.display().to_string();
        let mut templates = vec![NamedTemplate { name: "default".into(), origin, source }];
        templates.extend(additional_templates(&directory.join("additional_chat_templates"))?);
        return Ok(templates);
    }
    let path = directory.join("chat_template.json");
    let json = read_object(&path)?;
    if json.contains_key("chat_template") {
        return templates_of_key(&path, &json);
    }
    templates_of_key(&directory.join("tokenizer_config.json"), config)
}

fn additional_templates(directory: &Path) -> Result<Vec<NamedTemplate>, TokenizerError> {
    if !is_present(directory) {
        return Ok(Vec::new());
    }
    let unread = |source| TokenizerError::Read { path: directory.to_owned(), source };
    let entries = std::fs::read_dir(directory).map_err(unread)?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jinja"));
    paths.sort();
    let mut templates = Vec::new();
    for path in paths {
        let Some(source) = read(&path)? else { continue };
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        templates.push(NamedTemplate { name, origin: path.display().to_string(), source });
    }
    Ok(templates)
}

fn templates_of_key(path: &Path, object: &Map<String, Json>) -> Result<Vec<NamedTemplate>, TokenizerError> {
    let named = |name: &str, source: &str| NamedTemplate {
        name: name.to_owned(),
        origin: format!("{} (key `chat_template`)", path.display()),
        source: source.to_owned(),
    };
    let value = object.get("chat_template").unwrap_or(&Json::Null);
    let text_of = |item: &'_ Json, key: &str| item.get(key)?.as_str().map(str::to_owned);
    let listed = |item: &Json| Some(named(&text_of(item, "name")?, &text_of(item, "template")?));
    let templates = match value {
        Json::Null => Some(Vec::new()),
        Json::String(source) => Some(vec![named("default", source)]),
        Json::Array(items) => items.iter().map(listed).collect(),
        _ => None,
    };
    templates.ok_or_else(|| TokenizerError::InvalidValue {
        path: path.to_owned(),
        key: "chat_template",
        found: value.to_string().chars().take(60).collect(),
        expected: "a string or a list of {\"name\": ..., \"template\": ...}",
    })
}
