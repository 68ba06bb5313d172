//! The recipe that a conversion writes: settings with comments, as YAML.

use serde_json::Value as Json;

use crate::recipe::RecipeLocation;

/// A recipe in progress.
#[derive(Debug, Default)]
pub(super) struct RecipeDraft {
    settings: Vec<DraftSetting>,
}

/// A key of the recipe with its value.
#[derive(Debug)]
struct DraftSetting {
    path: String,
    value: Json,
    /// The key of the other toolkit; empty for a default.
    source: String,
    place: Option<RecipeLocation>,
    comment: Option<String>,
}

/// The origin of a setting in the other toolkit's file.
#[derive(Clone, Debug, Default)]
pub(super) struct SettingSource {
    pub(super) key: String,
    pub(super) place: Option<RecipeLocation>,
    pub(super) comment: Option<String>,
}

/// The text of a recipe, and the origin of each line.
#[derive(Debug, Default)]
pub(super) struct DraftText {
    pub(super) text: String,
    /// Key and location in the other toolkit's file, by line from 0.
    pub(super) origins: Vec<Option<(String, RecipeLocation)>>,
}

/// Top-level keys in the order of the file.
const ORDER: [&str; 36] = [
    "type",
    "model",
    "tokenizer",
    "data",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "epochs",
    "train_iters",
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "label_smoothing_factor",
    "deepspeed",
    "precision",
    "tensor_parallel_size",
    "context_parallel_size",
    "pipeline_parallel_size",
    "pipeline_schedule",
    "tiled_mlp_compute",
    "device",
    "ddp_timeout",
    "ddp_backend",
    "seed",
    "eval_interval",
    "evals_per_epoch",
    "eval_on_start",
    "metric_for_best_model",
    "greater_is_better",
    "train_log_iter_interval",
    "logger",
    "report_to",
    "run_name",
    "wandb",
    "mlflow",
    "output_dir",
    "checkpoint",
];

/// Keys that are first in their sections.
const FIRST: [&str; 5] = ["model.name_or_path", "model.type", "model.dtype", "data.sources", "data.eval_sources"];

impl RecipeDraft {
    /// Sets a key.
    ///
    /// # Errors
    /// The other toolkit's key that set another value before.
    pub(super) fn set(&mut self, path: &str, value: Json, source: SettingSource) -> Result<(), String> {
        let SettingSource { key, place, comment } = source;
        let earlier = self.settings.iter_mut().find(|setting| setting.path == path);
        match earlier {
            Some(earlier) if earlier.value == value => {
                if let (Some(comment), false) = (comment, earlier.comment.is_some()) {
                    earlier.comment = Some(comment);
                }
                Ok(())
            }
            Some(earlier) => Err(earlier.source.clone()),
            None => {
                self.settings.push(DraftSetting { path: path.to_owned(), value, source: key, place, comment });
                Ok(())
            }
        }
    }

    pub(super) fn get(&self, path: &str) -> Option<&Json> {
        self.settings.iter().find(|setting| setting.path == path).map(|setting| &setting.value)
    }

    /// Returns true if a key or a key below it is set.
    pub(super) fn has(&self, path: &str) -> bool {
        let below = format!("{path}.");
        self.settings.iter().any(|setting| setting.path == path || setting.path.starts_with(&below))
    }

    pub(super) fn remove(&mut self, path: &str) {
        self.settings.retain(|setting| setting.path != path);
    }

    /// Writes the recipe, with `header` as a comment at its head.
    pub(super) fn write(&self, header: &str) -> DraftText {
        let mut out = DraftText::default();
        out.line("# yaml-language-server: $schema=./recipe.schema.json", None);
        out.line("#", None);
        out.comment(0, header);
        let rank = |setting: &DraftSetting| {
            let section = setting.path.split('.').next().unwrap_or_default();
            let section = ORDER.iter().position(|key| *key == section).unwrap_or(ORDER.len());
            (section, FIRST.iter().position(|key| *key == setting.path).unwrap_or(FIRST.len()))
        };
        let mut settings: Vec<&DraftSetting> = self.settings.iter().collect();
        settings.sort_by_key(|setting| rank(setting));
        write_level(&mut out, &settings, 0);
        out
    }
}

/// Writes the settings of a map. `depth` parts of their paths are written.
fn write_level(out: &mut DraftText, settings: &[&DraftSetting], depth: usize) {
    let part = |setting: &DraftSetting| setting.path.split('.').nth(depth).unwrap_or_default().to_owned();
    let mut written: Vec<String> = Vec::new();
    let mut follows_section = false;
    for setting in settings {
        let key = part(setting);
        if written.contains(&key) {
            continue;
        }
        let group: Vec<&DraftSetting> = settings.iter().filter(|other| part(other) == key).copied().collect();
        written.push(key.clone());
        let is_leaf = setting.path.split('.').count() == depth + 1;
        if depth == 0 && (!is_leaf || follows_section) {
            out.line("", None);
        }
        follows_section = !is_leaf;
        match is_leaf {
            true => write_setting(out, setting, &key, depth),
            false => {
                out.line(&format!("{}{key}:", "  ".repeat(depth)), None);
                write_level(out, &group, depth + 1);
            }
        }
    }
}

fn write_setting(out: &mut DraftText, setting: &DraftSetting, key: &str, depth: usize) {
    if let Some(comment) = &setting.comment {
        out.comment(depth, comment);
    }
    let origin = setting.place.map(|place| (setting.source.clone(), place));
    let mut lines = Vec::new();
    block(&setting.value, key, depth, &mut lines);
    lines.iter().for_each(|line| out.line(line, origin.clone()));
}

/// Appends the lines of `key: value` in block style.
fn block(value: &Json, key: &str, depth: usize, lines: &mut Vec<String>) {
    let indent = "  ".repeat(depth);
    match value {
        Json::Object(map) if !map.is_empty() => {
            lines.push(format!("{indent}{}:", scalar_text(key)));
            map.iter().for_each(|(key, value)| block(value, key, depth + 1, lines));
        }
        Json::Array(items) if items.iter().any(|item| item.is_object() || item.is_array()) => {
            lines.push(format!("{indent}{}:", scalar_text(key)));
            items.iter().for_each(|item| list_item(item, depth + 1, lines));
        }
        _ => lines.push(format!("{indent}{}: {}", scalar_text(key), inline(value))),
    }
}

fn list_item(item: &Json, depth: usize, lines: &mut Vec<String>) {
    let indent = "  ".repeat(depth);
    let Json::Object(map) = item else {
        lines.push(format!("{indent}- {}", inline(item)));
        return;
    };
    let mut inner = Vec::new();
    map.iter().for_each(|(key, value)| block(value, key, depth + 1, &mut inner));
    if let Some(first) = inner.first_mut() {
        *first = format!("{indent}- {}", first.trim_start());
    }
    lines.append(&mut inner);
}

/// Returns a scalar, or a list or map in flow style.
fn inline(value: &Json) -> String {
    match value {
        Json::String(text) => scalar_text(text),
        Json::Array(items) => format!("[{}]", items.iter().map(inline).collect::<Vec<_>>().join(", ")),
        Json::Object(map) => {
            let entry = |(key, value): (&String, &Json)| format!("{}: {}", scalar_text(key), inline(value));
            format!("{{{}}}", map.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
        Json::Number(number) => number_text(number),
        other => other.to_string(),
    }
}

/// Returns a number in YAML, where an exponent needs a point or a sign.
fn number_text(number: &serde_json::Number) -> String {
    match number.as_f64() {
        Some(value) if number.is_f64() && value != 0.0 && value.abs() < 1e-3 => format!("{value:e}"),
        _ => number.to_string(),
    }
}

/// Returns text as a YAML scalar, quoted if YAML would read it otherwise.
fn scalar_text(text: &str) -> String {
    const WORDS: [&str; 9] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    let is_safe = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let first = text.chars().next();
    let starts_well =
        first.is_some_and(|c| c.is_ascii_alphabetic() || c == '/' || (c == '.' && text.starts_with("./")));
    match starts_well && text.chars().all(is_safe) && !WORDS.contains(&text.to_lowercase().as_str()) {
        true => text.to_owned(),
        // JSON strings are YAML.
        false => Json::from(text).to_string(),
    }
}

impl DraftText {
    fn line(&mut self, line: &str, origin: Option<(String, RecipeLocation)>) {
        self.text.push_str(line);
        self.text.push('\n');
        self.origins.push(origin);
    }

    /// Writes a comment in lines of at most 120 characters.
    fn comment(&mut self, depth: usize, text: &str) {
        let indent = "  ".repeat(depth);
        let mut line = String::new();
        for word in text.split_whitespace() {
            if !line.is_empty() && indent.len() + line.len() + word.len() + 3 > 120 {
                self.line(&format!("{indent}# {line}"), None);
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        if !line.is_empty() {
            self.line(&format!("{indent}# {line}"), None);
        }
    }

    /// Returns the key and location of the other toolkit that a line of the recipe has its value from. The line of a section
    /// has those of the key that the message quotes, or of its first key.
    pub(super) fn origin(&self, line: usize, message: &str) -> Option<&(String, RecipeLocation)> {
        let start = line.checked_sub(1)?;
        let below = self.origins.get(start..)?;
        if let Some(Some(origin)) = below.first() {
            return Some(origin);
        }
        let quoted = message.split('`').nth(1).map(|key| format!("{key}:"));
        let lines = self.text.lines().skip(start).zip(below);
        let mut named = lines.filter(|(line, _)| quoted.as_ref().is_some_and(|key| line.trim_start().starts_with(key)));
        let first = || below.iter().find_map(Option::as_ref);
        named.find_map(|(_, origin)| origin.as_ref()).or_else(first)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn source(line: usize) -> SettingSource {
        let place = RecipeLocation::File { file: 0, line, column: 1, len: 1 };
        SettingSource { key: format!("key_{line}"), place: Some(place), comment: None }
    }

    #[test]
    fn settings_are_written_as_yaml_with_the_origin_of_each_line() {
        let mut draft = RecipeDraft::default();
        let sources = json!([{"name_or_path": "a: b", "role_mapping": {"user": "q"}}]);
        assert_eq!(draft.set("data.sources", sources, source(7)), Ok(()));
        let changed = SettingSource { comment: Some("Changed.".to_owned()), ..source(2) };
        assert_eq!(draft.set("optimizer.betas", json!([0.9, 1e-5]), changed), Ok(()));
        assert_eq!(draft.set("type", json!("sft"), SettingSource::default()), Ok(()));
        assert_eq!(draft.set("type", json!("causal"), source(9)), Err(String::new()));
        let DraftText { text, origins } = draft.write("Head.");
        let want = "# yaml-language-server: $schema=./recipe.schema.json\n#\n# Head.\ntype: sft\n\ndata:\n  sources:\n    - \
                    name_or_path: \"a: b\"\n      role_mapping:\n        user: q\n\noptimizer:\n  # Changed.\n  betas: [0.9, 1e-5]\n";
        assert_eq!(text, want);
        assert_eq!(origins[9].as_ref().map(|(key, _)| key.as_str()), Some("key_7"));
        assert_eq!(origins[3], None);
    }

    #[test]
    fn text_that_yaml_reads_otherwise_is_quoted() {
        for plain in ["HuggingFaceTB/SmolLM2-135M", "./out", "/tmp/a.b", "adamw"] {
            assert_eq!(scalar_text(plain), plain);
        }
        for quoted in ["yes", "1e5", "train[:5%]", "a:b", "", "- x", "#a", "null", ".5", "a b"] {
            assert!(scalar_text(quoted).starts_with('"'), "{quoted}");
        }
    }
}
