//! The mixture of the training sources.

use super::resolver::Resolver;
use crate::data::{Mixture, StoppingStrategy};
use crate::recipe::{DataSource, HumanFloat, SourceOptions};

const STOPPING: &str = "data.stopping_strategy";

pub(super) fn resolve(resolver: &mut Resolver, n_sources: usize) -> Mixture {
    let data = &resolver.recipe().data;
    refuse_for_evaluation(resolver);
    let weights = factors(resolver, "weight", |source| source.weight);
    let repeats = factors(resolver, "repeat", |source| source.repeat);
    let is_interleaved = weights.is_some() || data.stopping_strategy.is_some();
    if let (true, Some(repeats)) = (is_interleaved, &repeats) {
        let (path, _) = &repeats[0];
        let message = format!("{path} contradicts the interleaving of sources: an epoch ends by {STOPPING}");
        resolver.report_with_advice(&[path], message, format!("keep `repeat`, or `weight` and {STOPPING}"));
    }
    if is_interleaved && n_sources < 2 {
        resolver.note(format!("{STOPPING} and weight have no effect with one source"));
        return Mixture::Concatenate;
    }
    if !is_interleaved {
        return repeats.map_or(Mixture::Concatenate, |_| Mixture::Repeat(all(resolver, |source| source.repeat)));
    }
    let stopping_strategy = resolver.pick(STOPPING, data.stopping_strategy, StoppingStrategy::FirstExhausted);
    let probabilities = match weights {
        Some(weights) if weights.len() < n_sources => {
            let (path, _) = &weights[0];
            let advice = "set `weight` for every source, or for none";
            resolver.report_with_advice(&[path], format!("{path}: not every source has a weight"), advice);
            Vec::new()
        }
        Some(_) => normalized(all(resolver, |source| source.weight)),
        None => Vec::new(),
    };
    Mixture::Interleave { probabilities, stopping_strategy }
}

/// Returns the path of a key that sets the mixture. `None` if the sources follow each other.
pub(super) fn key(resolver: &Resolver, mixture: &Mixture) -> Option<String> {
    if *mixture == Mixture::Concatenate {
        return None;
    }
    let sources = resolver.recipe().data.sources.iter().enumerate();
    let mut keys = sources.filter_map(|(idx, DataSource(source))| {
        let key = source.weight.map(|_| "weight").or(source.repeat.map(|_| "repeat"))?;
        Some(path(resolver, "data.sources", idx, key))
    });
    Some(keys.next().unwrap_or_else(|| STOPPING.to_owned()))
}

/// Returns the paths and values of a key of the sources. `None` if no source sets it.
fn factors(
    resolver: &mut Resolver,
    key: &str,
    factor: impl Fn(&SourceOptions) -> Option<HumanFloat>,
) -> Option<Vec<(String, f64)>> {
    let sources = &resolver.recipe().data.sources;
    let mut found = Vec::new();
    for (idx, DataSource(source)) in sources.iter().enumerate() {
        let Some(HumanFloat(value)) = factor(source) else { continue };
        let path = path(resolver, "data.sources", idx, key);
        if !(value > 0.0 && value.is_finite()) {
            resolver.report_with_advice(
                &[&path],
                format!("{path}: expected a number above 0, found {value}"),
                "to leave a source out, remove it from data.sources",
            );
        }
        found.push((path, value));
    }
    (!found.is_empty()).then_some(found)
}

/// Returns a number for each source; 1 if it sets none.
fn all(resolver: &Resolver, factor: impl Fn(&SourceOptions) -> Option<HumanFloat>) -> Vec<f64> {
    let sources = &resolver.recipe().data.sources;
    sources.iter().map(|DataSource(source)| factor(source).map_or(1.0, |factor| factor.0)).collect()
}

fn normalized(weights: Vec<f64>) -> Vec<f64> {
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

fn refuse_for_evaluation(resolver: &mut Resolver) {
    for (idx, DataSource(source)) in resolver.recipe().data.eval_sources.iter().enumerate() {
        for (key, is_set) in [("weight", source.weight.is_some()), ("repeat", source.repeat.is_some())] {
            if is_set {
                let path = path(resolver, "data.eval_sources", idx, key);
                let message = format!("{path}: an evaluation reads every row once");
                resolver.report_with_advice(&[&path], message, "remove the key");
            }
        }
    }
}

/// Returns the path of a source's key. A single source may be written without a list.
fn path(resolver: &Resolver, list: &str, idx: usize, key: &str) -> String {
    let item = format!("{list}.{idx}");
    if resolver.loaded.is_set(&item) { format!("{item}.{key}") } else { format!("{list}.{key}") }
}
