//! The conversion of a file by a table of rules.

use std::path::Path;

use serde_json::{Map, Value as Json};

use super::draft::{RecipeDraft, SettingSource};
use super::item::ForeignItem;
use super::report::{ConversionFinding, FindingKind};
use crate::recipe::{Fault, RecipeLocation, RecipeNode, foreign_key_advice, missing_feature_advice};

/// A table of rules, by the other toolkit's key.
pub(super) type KeyRules = &'static [(&'static str, KeyRule)];

/// The conversion of a key.
#[derive(Clone, Copy)]
pub(super) enum KeyRule {
    /// The value belongs to this key of the recipe, with the same meaning.
    To(&'static str),
    /// The program always behaves so, or the key has no influence on the result.
    BuiltIn(&'static str),
    /// The recipe has no such key, for this reason.
    Nothing(&'static str),
    /// The recipe has no such key if the value is set to anything but false, 0 or an empty text.
    Unless(&'static str),
    /// The recipe has no such key, as with `Unless`: the word names a missing feature.
    MissingFeature(&'static str),
    /// The function converts the key, with other keys.
    By(fn(&mut Converter<'_>, &ForeignItem<'_>)),
    /// The function of another key, or the last function of the toolkit, reads it.
    Elsewhere,
}

/// A conversion in progress.
pub(super) struct Converter<'s> {
    root: ForeignItem<'s>,
    /// The other toolkit's name.
    pub(super) toolkit: &'static str,
    /// The folder of the file.
    pub(super) folder: &'s Path,
    /// The recipe.
    pub(super) draft: RecipeDraft,
    pub(super) findings: Vec<ConversionFinding>,
    pub(super) faults: Vec<Fault>,
    /// Number of ranks that the settings need.
    pub(super) n_ranks: usize,
}

impl<'s> Converter<'s> {
    pub(super) fn new(root: &'s RecipeNode, toolkit: &'static str, folder: &'s Path) -> Self {
        let root = ForeignItem { key: String::new(), place: root.place, node: root };
        Self {
            root,
            toolkit,
            folder,
            draft: RecipeDraft::default(),
            findings: Vec::new(),
            faults: Vec::new(),
            n_ranks: 1,
        }
    }

    /// Returns the value at a path, unless it is absent or null.
    pub(super) fn get(&self, path: &str) -> Option<ForeignItem<'s>> {
        path.split('.').try_fold(self.root.clone(), |item, part| item.get(part))
    }

    /// Returns true if a flag is set to true.
    pub(super) fn is_on(&self, path: &str) -> bool {
        self.get(path).and_then(|item| item.flag()) == Some(true)
    }

    /// Applies the rules to all keys, in the order of the file.
    pub(super) fn apply(&mut self, tables: &[KeyRules]) {
        for item in self.root.clone().entries() {
            self.apply_to(&item, tables);
        }
    }

    fn apply_to(&mut self, item: &ForeignItem<'s>, tables: &[KeyRules]) {
        let rule = tables.iter().find_map(|rules| rules.iter().find(|(key, _)| *key == item.key));
        match rule {
            Some(_) if item.is_null() => {}
            Some((_, rule)) => self.apply_rule(item, *rule),
            None if item.is_section() => item.entries().iter().for_each(|entry| self.apply_to(entry, tables)),
            None => self.unknown(item),
        }
    }

    fn apply_rule(&mut self, item: &ForeignItem<'s>, rule: KeyRule) {
        match rule {
            KeyRule::To(key) => self.map(item, [(key, item.scalar())]),
            KeyRule::BuiltIn(note) => self.built_in(item, note),
            KeyRule::Nothing(why) => self.nothing(item, why),
            KeyRule::Unless(_) | KeyRule::MissingFeature(_) if is_off(item) => self.built_in(item, "off"),
            KeyRule::Unless(why) => self.nothing(item, why),
            KeyRule::MissingFeature(word) => self.missing(item, word),
            KeyRule::By(convert) => convert(self, item),
            KeyRule::Elsewhere => {}
        }
    }

    /// Records that a feature is missing, in the words of the table of missing features.
    pub(super) fn missing(&mut self, item: &ForeignItem<'_>, word: &str) {
        self.nothing(item, &missing_feature_advice(word).unwrap_or_else(|| "not supported".to_owned()));
    }

    fn unknown(&mut self, item: &ForeignItem<'_>) {
        let advice = foreign_key_advice(item.name()).map_or_else(String::new, |advice| format!("; {advice}"));
        self.nothing(item, &format!("not a key that the conversion knows{advice}"));
    }

    /// Reports the keys that no rule has reported.
    pub(super) fn report_unread(&mut self) {
        let mut leaves = Vec::new();
        collect_leaves(&self.root.clone(), &mut leaves);
        for leaf in leaves {
            let is_below = |key: &str, above: &str| key.strip_prefix(above).is_some_and(|rest| rest.starts_with('.'));
            let covers = |finding: &ConversionFinding| {
                leaf.key == finding.key || is_below(&leaf.key, &finding.key) || is_below(&finding.key, &leaf.key)
            };
            if !self.findings.iter().any(covers) {
                self.nothing(&leaf, "has no effect together with the other keys of the file");
            }
        }
    }

    /// Returns a degree of parallelism, and multiplies the number of ranks by it. Any other value is a fault.
    pub(super) fn degree(&mut self, item: &ForeignItem<'_>) -> Option<u64> {
        let degree = item.whole().filter(|n| *n > 0);
        match degree {
            Some(n) => self.n_ranks *= n as usize,
            None => self.fail(item, "a number of ranks"),
        }
        degree
    }

    /// Records that the recipe has the same settings.
    pub(super) fn map<const N: usize>(&mut self, item: &ForeignItem<'_>, settings: [(&str, Json); N]) {
        self.record(FindingKind::Mapped, item, settings.to_vec(), "");
    }

    /// Records that the program always behaves so.
    pub(super) fn built_in(&mut self, item: &ForeignItem<'_>, note: &str) {
        self.record(FindingKind::Mapped, item, Vec::new(), note);
    }

    /// Records that the recipe has other settings, or settings with another meaning.
    pub(super) fn change<const N: usize>(&mut self, item: &ForeignItem<'_>, settings: [(&str, Json); N], note: &str) {
        self.record(FindingKind::Changed, item, settings.to_vec(), note);
    }

    /// Records that the recipe has no such key.
    pub(super) fn nothing(&mut self, item: &ForeignItem<'_>, why: &str) {
        self.record(FindingKind::NoCounterpart, item, Vec::new(), why);
    }

    /// Records a value that the other toolkit would refuse, too.
    pub(super) fn fail(&mut self, item: &ForeignItem<'_>, expected: &str) {
        let message = format!("{}: expected {expected}, found {}", item.key, item.node.describe());
        self.faults.push(Fault::new(Some(item.place), message));
    }

    /// Records a key without which the recipe would train something else.
    pub(super) fn refuse(&mut self, item: &ForeignItem<'_>, problem: &str) {
        self.faults.push(Fault::new(Some(item.place), format!("{}: {problem}", item.key)));
    }

    pub(super) fn record(
        &mut self,
        kind: FindingKind,
        item: &ForeignItem<'_>,
        settings: Vec<(&str, Json)>,
        note: &str,
    ) {
        let comment = (kind == FindingKind::Changed)
            .then(|| format!("Changed from `{}` (line {}): {note}.", item.key, item.line()));
        for (path, value) in &settings {
            // The kind of a run follows from any data set.
            let comment = comment.clone().filter(|_| *path != "type");
            self.set(path, value.clone(), &item.key, Some(item.place), comment);
        }
        let value = if is_secret(item.name()) { "(not shown)".into() } else { item.json() };
        self.findings.push(ConversionFinding {
            kind,
            key: item.key.clone(),
            line: Some(item.line()),
            value,
            recipe: settings.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
            note: note.to_owned(),
        });
    }

    /// Records a finding whose settings are part of another one's.
    pub(super) fn note(&mut self, kind: FindingKind, item: &ForeignItem<'_>, recipe: Vec<(String, Json)>, note: &str) {
        let recipe = recipe.into_iter().collect();
        let (line, value) = (Some(item.line()), item.json());
        self.findings.push(ConversionFinding {
            kind,
            key: item.key.clone(),
            line,
            value,
            recipe,
            note: note.to_owned(),
        });
    }

    /// Sets a default of the other toolkit, unless a key has set it. A key in parentheses is a description.
    pub(super) fn default(&mut self, key: &str, path: &str, value: Json) {
        if self.draft.has(path) || self.get(key).is_some() {
            return;
        }
        let note = format!("the default of {}", self.toolkit);
        let name = if key.starts_with('(') { key.to_owned() } else { format!("(`{key}`)") };
        self.set(path, value.clone(), "", None, Some(format!("Default of {} {name}.", self.toolkit)));
        let recipe = Map::from_iter([(path.to_owned(), value)]);
        self.findings.push(ConversionFinding {
            kind: FindingKind::Mapped,
            key: key.to_owned(),
            line: None,
            value: Json::Null,
            recipe,
            note,
        });
    }

    fn set(&mut self, path: &str, value: Json, key: &str, place: Option<RecipeLocation>, comment: Option<String>) {
        let source = SettingSource { key: key.to_owned(), place, comment };
        if let Err(earlier) = self.draft.set(path, value, source) {
            let message = format!("{key} and {earlier} give different values of {path}");
            self.faults.push(Fault::new(place, message));
        }
    }
}

fn is_off(item: &ForeignItem<'_>) -> bool {
    item.flag() == Some(false) || item.number() == Some(0.0) || item.text() == Some("") || item.text() == Some("none")
}

/// Returns true for a key whose value is a credential.
fn is_secret(name: &str) -> bool {
    let name = name.to_lowercase();
    let is_hub_token = name.ends_with("token") && (name.contains("hf") || name.contains("hub"));
    is_hub_token || ["api_key", "secret", "password"].iter().any(|part| name.contains(part))
}

fn collect_leaves<'s>(item: &ForeignItem<'s>, leaves: &mut Vec<ForeignItem<'s>>) {
    for entry in item.entries() {
        match entry.is_section() {
            true => collect_leaves(&entry, leaves),
            false if entry.is_null() => {}
            false => leaves.push(entry),
        }
    }
}
