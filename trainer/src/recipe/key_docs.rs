//! The documentation of recipe keys, from the JSON schema: meaning, type, default, values and other names.

use serde_json::Value;

use super::foreign_keys::FOREIGN_KEYS;
use super::json_schema;
use super::keys::{advice, counterpart, foreign_key_advice, foreign_names, is_key, numbered, visit_keys};
use candlewick_text::suggestion::nearest;

/// The documentation of a recipe key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeyDoc {
    /// The path, with `N` for an index of a list: `data.sources.N.split`.
    pub path: String,
    /// The meaning, in one line. It does not repeat the default.
    pub meaning: String,
    /// The type in words: `text`, `whole number`, `list of maps`.
    pub value_type: String,
    /// The default in words; `None` for a section, and for a key without effect unless it is set.
    pub default: Option<String>,
    /// The allowed values, if the key has a fixed set of them.
    pub values: Vec<ValueDoc>,
    /// Other spellings of the values.
    pub value_aliases: Vec<String>,
    /// Other names of the key in recipes.
    pub aliases: Vec<String>,
    /// The names in other toolkits that differ from the key's own name, each with advice that may be empty.
    pub other_names: Vec<(&'static str, &'static str)>,
}

/// An allowed value of a key.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueDoc {
    /// The value.
    pub name: String,
    /// Its meaning; may be empty.
    pub meaning: String,
}

/// A key that the user named.
#[derive(Clone, Debug, PartialEq)]
pub enum NamedKey {
    /// A key of the recipe, at this path of the schema.
    Documented(String),
    /// A key of a map with another program's schema, and the path of that map.
    InMap(String),
    /// A key of another toolkit: the recipe's key, and the advice that names it.
    Foreign(String, String),
    /// No key, with advice if there is any.
    Unknown(Option<String>),
}

/// Returns the documentation of all keys, a section before its keys. Aliases are no keys of their own.
pub fn key_docs() -> Vec<KeyDoc> {
    const ALIAS: &str = "Alias of `";
    let schema = json_schema();
    let mut docs: Vec<KeyDoc> = Vec::new();
    let mut aliases = Vec::new();
    visit_keys(&schema, &mut |property| {
        let description = property.schema["description"].as_str().unwrap_or_default();
        if let Some(name) = description.strip_prefix(ALIAS).and_then(|rest| rest.split('`').next()) {
            let (section, alias) = property.path.rsplit_once('.').unwrap_or(("", property.path));
            aliases.push((format!("{section}.{name}"), alias.to_owned()));
            return;
        }
        docs.push(KeyDoc::of(property.path, property.schema, property.is_required, &schema["$defs"]));
    });
    for (path, alias) in aliases {
        if let Some(doc) = docs.iter_mut().find(|doc| doc.path == path) {
            doc.other_names.retain(|(name, _)| *name != alias);
            doc.aliases.push(alias);
        }
    }
    docs
}

/// Finds the key that a user names: with or without indices, by an alias, or by its name in another toolkit.
pub fn find_key(docs: &[KeyDoc], key: &str) -> NamedKey {
    let path = numbered(key);
    // An item of a list has the documentation of the list.
    let path = path.strip_suffix(".N").unwrap_or(&path).to_owned();
    let (section, name) = path.rsplit_once('.').unwrap_or(("", &path));
    let is_alias = |doc: &&KeyDoc| {
        doc.path.rsplit_once('.').is_some_and(|(of, _)| of == section) && doc.aliases.iter().any(|alias| alias == name)
    };
    if let Some(doc) = docs.iter().find(|doc| doc.path == path).or_else(|| docs.iter().find(is_alias)) {
        return NamedKey::Documented(doc.path.clone());
    }
    if is_key(&path) {
        let maps = docs.iter().filter(|doc| path.starts_with(&format!("{}.", doc.path)));
        return maps
            .max_by_key(|doc| doc.path.len())
            .map_or(NamedKey::Unknown(None), |d| NamedKey::InMap(d.path.clone()));
    }
    match (counterpart(key), foreign_key_advice(key)) {
        (Some(key), Some(advice)) => NamedKey::Foreign(key.to_owned(), advice),
        (_, advice) => NamedKey::Unknown(advice.or_else(|| suggestion(docs, &path))),
    }
}

/// Suggests a key of the same section, of the whole recipe, or of another toolkit.
fn suggestion(docs: &[KeyDoc], path: &str) -> Option<String> {
    let section = path.rsplit_once('.').map_or("", |(section, _)| section);
    let siblings = docs.iter().filter_map(|doc| match doc.path.rsplit_once('.') {
        Some((of, name)) => (of == section).then_some(name),
        None => section.is_empty().then_some(doc.path.as_str()),
    });
    let siblings: Vec<&str> = siblings.collect();
    let foreign = || {
        let name = nearest(path, FOREIGN_KEYS.iter().map(|foreign| foreign.name))?;
        Some(format!("did you mean `{name}` of other toolkits? {}", foreign_key_advice(name)?))
    };
    let whole = || nearest(path, docs.iter().map(|doc| &doc.path)).map(|path| format!("did you mean `{path}`?"));
    advice(path, &siblings).or_else(whole).or_else(foreign)
}

impl KeyDoc {
    fn of(path: &str, schema: &Value, is_required: bool, definitions: &Value) -> Self {
        let description = one_line(schema["description"].as_str().unwrap_or_default());
        let (meaning, default) = split_default(&description);
        let mut doc =
            Self { path: path.to_owned(), meaning, value_type: type_in_words(schema, definitions), ..Self::default() };
        doc.default = if is_required { Some("required".to_owned()) } else { default };
        doc.add_values(schema, definitions);
        let own = path.rsplit('.').next().unwrap_or(path);
        let others = foreign_names(path).filter(|foreign| foreign.name != own);
        doc.other_names = others.map(|foreign| (foreign.name, foreign.remark)).collect();
        doc
    }

    /// Returns true if the value is a map with keys of its own.
    pub fn is_section(&self) -> bool {
        self.value_type.contains("section")
    }

    fn add_values(&mut self, schema: &Value, definitions: &Value) {
        let schema = dereferenced(schema, definitions);
        let meaning = one_line(schema["description"].as_str().unwrap_or_default());
        let value =
            |name: &Value| name.as_str().map(|name| ValueDoc { name: name.to_owned(), meaning: meaning.clone() });
        self.values.extend(value(&schema["const"]));
        let names = schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
        if meaning == "Aliases." {
            self.value_aliases.extend(names.map(str::to_owned));
        } else {
            let without_meaning = |name: &str| ValueDoc { name: name.to_owned(), meaning: String::new() };
            self.values.extend(names.map(without_meaning));
        }
        forms(schema).for_each(|form| self.add_values(form, definitions));
        if schema["items"].is_object() {
            self.add_values(&schema["items"], definitions);
        }
        let mut seen = Vec::new();
        self.values.retain(|value| {
            let is_new = !seen.contains(&value.name);
            seen.push(value.name.clone());
            is_new
        });
    }
}

/// Splits a description into the meaning and the default, which is a sentence `Default X.`, or the name before `(default)`.
fn split_default(description: &str) -> (String, Option<String>) {
    let (mut meaning, mut default) = (Vec::new(), None);
    for sentence in description.split_inclusive(". ") {
        let text = sentence.trim();
        match text.strip_prefix("Default").filter(|rest| rest.starts_with([' ', ':'])) {
            Some(value) if default.is_none() => {
                let value = value.trim_start_matches(':').trim();
                default = Some(value.strip_suffix('.').unwrap_or(value).to_owned());
            }
            _ => meaning.push(text),
        }
    }
    let named = || {
        let at = ["(default)", "(default;"].iter().find_map(|mark| description.find(&format!(" {mark}")))?;
        let before = &description[..at];
        Some(before.rsplit(' ').next().unwrap_or(before).to_owned())
    };
    (meaning.join(" "), default.or_else(named))
}

fn dereferenced<'a>(schema: &'a Value, definitions: &'a Value) -> &'a Value {
    match schema["$ref"].as_str().and_then(|at| at.strip_prefix("#/$defs/")) {
        Some(name) => &definitions[name],
        None => schema,
    }
}

fn forms(schema: &Value) -> impl Iterator<Item = &Value> {
    ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|form| schema[form].as_array()).flatten()
}

fn type_in_words(schema: &Value, definitions: &Value) -> String {
    let mut words = Vec::new();
    add_types(schema, definitions, &mut words);
    words.join(" or ")
}

/// Adds the types of a schema in words, each once.
fn add_types(schema: &Value, definitions: &Value, words: &mut Vec<String>) {
    let number = match schema["$ref"].as_str() {
        Some("#/$defs/HumanInt") => Some("whole number"),
        Some("#/$defs/HumanFloat") => Some("number"),
        _ => None,
    };
    let mut add = |word: String| {
        if !word.is_empty() && !words.contains(&word) {
            words.push(word);
        }
    };
    if let Some(number) = number {
        return add(number.to_owned());
    }
    let schema = dereferenced(schema, definitions);
    let is_name = schema["const"].is_string() || schema["enum"].is_array();
    let names = match &schema["type"] {
        _ if is_name => vec!["name"],
        Value::String(name) => vec![name.as_str()],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    for name in names {
        add(match name {
            "null" => String::new(),
            "string" => "text".to_owned(),
            "boolean" => "true or false".to_owned(),
            "integer" => "whole number".to_owned(),
            "array" => list_in_words(schema, definitions),
            "object" if schema["properties"].is_object() => "section".to_owned(),
            "object" => "map".to_owned(),
            other => other.to_owned(),
        });
    }
    forms(schema).for_each(|form| add_types(form, definitions, words));
}

fn list_in_words(schema: &Value, definitions: &Value) -> String {
    let of = match (&schema["prefixItems"], &schema["items"]) {
        (Value::Array(items), _) => {
            let first = items.first().map_or_else(String::new, |item| plural(&type_in_words(item, definitions)));
            format!("{} {first}", items.len())
        }
        (_, items @ Value::Object(_)) => plural(&type_in_words(items, definitions)),
        _ => String::new(),
    };
    if of.is_empty() { "list".to_owned() } else { format!("list of {of}") }
}

fn plural(types: &str) -> String {
    let of_one = |word: &str| match word {
        _ if word.starts_with("list of ") => word.replacen("list", "lists", 1),
        _ => format!("{word}s"),
    };
    types.replace("true or false", "boolean").split(" or ").map(of_one).collect::<Vec<_>>().join(" or ")
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn doc(path: &str) -> KeyDoc {
        key_docs().into_iter().find(|doc| doc.path == path).unwrap()
    }

    #[track_caller]
    fn check(path: &str, value_type: &str, default: Option<&str>) {
        let doc = doc(path);
        assert_eq!((doc.value_type.as_str(), doc.default.as_deref()), (value_type, default), "{path}");
        assert!(!doc.meaning.contains("Default"), "{path}: {}", doc.meaning);
    }

    #[test]
    fn a_key_has_its_type_and_default() {
        check("epochs", "number", Some("1"));
        check("optimizer.eps", "number", Some("1e-8"));
        check("optimizer.betas", "list of 2 numbers", Some("`[0.9, 0.999]`"));
        check("pipeline_layers", "list of whole numbers", Some("balances the time of the stages, including the head"));
        check("eval_on_start", "true or false", Some("false"));
        check("type", "name", Some("`sft`"));
        check("report_to", "name or list of names", Some("`none`"));
        let folders = "the folder `checkpoints` of the run's `output_dir`, or `model` with type `huggingface`";
        check("checkpoint.N.output_dir", "text", Some(folders));
        check("optimizer", "section", None);
        check("deepspeed", "map", None);
    }

    #[test]
    fn a_default_in_a_description_is_found() {
        // A map describes the defaults of its keys.
        for doc in key_docs().iter().filter(|doc| doc.value_type != "map") {
            assert!(doc.default.is_some() || !doc.meaning.contains("efault"), "{}: {}", doc.path, doc.meaning);
        }
        check("data.truncation", "name", Some("`error` for `sft`, `split` for `causal`"));
    }

    #[test]
    fn a_key_has_its_values_and_other_names() {
        let dtype = doc("model.dtype");
        assert!(dtype.values.iter().any(|value| value.name == "bf16"), "{dtype:?}");
        assert!(dtype.value_aliases.iter().any(|alias| alias == "bfloat16"), "{dtype:?}");
        let rate = doc("optimizer.learning_rate");
        assert_eq!(rate.aliases, ["lr"]);
        assert!(rate.other_names.is_empty(), "{rate:?}");
        let names: Vec<&str> = doc("train_iters").other_names.iter().map(|(name, _)| *name).collect();
        assert!(names.contains(&"max_steps"), "{names:?}");
    }

    #[test]
    fn every_key_has_a_meaning() {
        let docs = key_docs();
        let without: Vec<_> = docs.iter().filter(|doc| doc.meaning.is_empty()).collect();
        assert!(without.is_empty(), "{without:?}");
        assert!(docs.iter().all(|doc| !doc.value_type.is_empty()), "{docs:?}");
    }

    #[test]
    fn a_key_is_found_by_each_of_its_names() {
        let docs = key_docs();
        let documented = |path: &str| NamedKey::Documented(path.to_owned());
        for (key, path) in [
            ("data.max_length", "data.max_length"),
            ("data.sources.3.split", "data.sources.N.split"),
            ("data.sources.N.split", "data.sources.N.split"),
            ("checkpoint.1", "checkpoint"),
            ("checkpoint.save_total_limit", "checkpoint.N.save_total_limit"),
            ("optimizer.lr", "optimizer.learning_rate"),
        ] {
            assert_eq!(find_key(&docs, key), documented(path), "{key}");
        }
        assert_eq!(find_key(&docs, "deepspeed.zero_optimization.stage"), NamedKey::InMap("deepspeed".to_owned()));
        assert!(matches!(find_key(&docs, "max_steps"), NamedKey::Foreign(key, _) if key == "train_iters"));
    }

    #[test]
    fn an_unknown_key_gets_a_suggestion() {
        let docs = key_docs();
        for (key, part) in [
            ("data.max_lenght", "did you mean `max_length`?"),
            ("epochz", "did you mean `epochs`?"),
            ("optimiser", "did you mean `optimizer`?"),
            ("per_device_train_batchsize", "`per_device_train_batch_size` of other toolkits? use `micro_batch_size`"),
            ("trust_remote_code", "a model's code is never executed"),
        ] {
            match find_key(&docs, key) {
                NamedKey::Unknown(Some(advice)) => assert!(advice.contains(part), "{key}: {advice}"),
                other => panic!("{key}: {other:?}"),
            }
        }
        assert_eq!(find_key(&docs, "xyzzy"), NamedKey::Unknown(None));
    }
}
