//! The state of a resolution: settings, faults and notes.

use serde::Serialize;

use super::environment::Environment;
use crate::plan::ResolvedSetting;
use crate::recipe::{
    Fault, HumanFloat, HumanInt, Loaded, Origin, Recipe, RecipeDialect, RecipeError, missing_feature_advice,
};

pub(super) struct Resolver<'a> {
    pub(super) loaded: &'a Loaded,
    pub(super) env: &'a Environment,
    faults: Vec<Fault>,
    settings: Vec<ResolvedSetting>,
    notes: Vec<String>,
}

impl<'a> Resolver<'a> {
    pub(super) fn new(loaded: &'a Loaded, env: &'a Environment) -> Self {
        Self { loaded, env, faults: Vec::new(), settings: Vec::new(), notes: loaded.notes().to_vec() }
    }

    pub(super) fn recipe(&self) -> &'a Recipe {
        &self.loaded.recipe
    }

    /// Returns true if the recipe file is in ArcticTraining's dialect, and has its defaults.
    pub(super) fn is_arctic_training(&self) -> bool {
        matches!(self.loaded.dialect(), RecipeDialect::ArcticTraining(_))
    }

    /// Returns the value of a key or its default, and records it in the table of settings.
    pub(super) fn pick<T: Serialize>(&mut self, key: &str, given: Option<T>, default: T) -> T {
        let origin = if given.is_some() { self.loaded.origin(&[key]) } else { Origin::Default };
        self.record(key, given.unwrap_or(default), origin)
    }

    /// Returns a count like [`Resolver::pick`].
    pub(super) fn count(&mut self, key: &str, given: Option<HumanInt>, default: usize) -> usize {
        self.pick(key, given.map(|n| n.0), default)
    }

    /// Returns a count like [`Resolver::count`], and reports a fault if it is 0.
    pub(super) fn positive(&mut self, key: &str, given: Option<HumanInt>, default: usize) -> usize {
        let value = self.count(key, given, default);
        if value == 0 {
            self.report(&[key], format!("{key}: expected at least 1, found 0"));
        }
        value
    }

    /// Returns a number like [`Resolver::pick`], and reports a fault outside of `low..=high`.
    pub(super) fn number(&mut self, key: &str, given: Option<HumanFloat>, default: f64, low: f64, high: f64) -> f64 {
        let value = self.pick(key, given.map(|x| x.0), default);
        if !(low..=high).contains(&value) {
            let bounds = if high == f64::MAX { format!("at least {low}") } else { format!("{low} to {high}") };
            self.report(&[key], format!("{key}: expected {bounds}, found {value}"));
        }
        value
    }

    /// Returns the coefficient of a loss like [`Resolver::pick`], and reports a fault unless it is at least 0 and finite in f32.
    pub(super) fn coefficient(&mut self, key: &str, given: Option<HumanFloat>, default: f64) -> f64 {
        let value = self.pick(key, given.map(|x| x.0), default);
        if let Err(expected) = check_coefficient(value) {
            self.report(&[key], format!("{key}: expected {expected}, found {}", short(value)));
        }
        value
    }

    /// Records a value in the table of settings.
    pub(super) fn record<T: Serialize>(&mut self, key: &str, value: T, origin: Origin) -> T {
        self.settings.push(ResolvedSetting::new(key, &value, origin));
        value
    }

    /// Reports a fault at the first of these keys that is set.
    pub(super) fn report(&mut self, keys: &[&str], message: impl Into<String>) {
        self.faults.push(self.loaded.fault_at(keys, message));
    }

    /// Reports a fault at a key, with advice.
    pub(super) fn report_with_advice(&mut self, keys: &[&str], message: impl Into<String>, advice: impl Into<String>) {
        self.faults.push(self.loaded.fault_at(keys, message).note(advice));
    }

    /// Reports a key or value without support, such as `beta: 0.1`, with the replacement of the missing feature if it is one, else
    /// with the advice.
    pub(super) fn report_missing(&mut self, keys: &[&str], what: &str, advice: impl Into<String>) {
        let (key, value) = what.split_once(": ").unwrap_or((what, ""));
        let feature = missing_feature_advice(value.trim_matches('"')).or_else(|| missing_feature_advice(key));
        let advice = feature.unwrap_or_else(|| advice.into());
        self.report_with_advice(keys, format!("`{what}` is not supported"), advice);
    }

    pub(super) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    pub(super) fn finish(self) -> Result<(Vec<ResolvedSetting>, Vec<String>), RecipeError> {
        if self.faults.is_empty() { Ok((self.settings, self.notes)) } else { Err(self.loaded.error(self.faults)) }
    }
}

/// Fails with the expected values unless the coefficient of a loss is at least 0 and finite in f32, in which losses are computed.
pub(super) fn check_coefficient(value: f64) -> Result<(), &'static str> {
    match (0.0..=f64::from(f32::MAX)).contains(&value) {
        true => Ok(()),
        false if value > 0.0 => Err("at most 3.4e38, the largest f32"),
        false => Err("at least 0"),
    }
}

/// Returns a number as text, with an exponent if it is large.
pub(super) fn short(value: f64) -> String {
    if value.abs() < 1e9 { value.to_string() } else { format!("{value:e}") }
}

/// Returns advice to use one of these numbers.
pub(super) fn one_of(numbers: impl Iterator<Item = usize>) -> String {
    let numbers: Vec<String> = numbers.map(|n| n.to_string()).collect();
    format!("use {}", numbers.join(" or "))
}

/// Returns advice to use one of these degrees, or to start more ranks if there is one.
pub(super) fn degree_advice(resolver: &Resolver, possible: impl Iterator<Item = usize>) -> String {
    match resolver.env.world.n_ranks {
        1 => "start the ranks that the recipe needs; to check it before, pass their number with --ranks N".to_owned(),
        _ => one_of(possible),
    }
}
