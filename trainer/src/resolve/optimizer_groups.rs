//! The kind of optimizer with its hyperparameters, and groups of parameters with settings of their own.

use std::collections::BTreeSet;
use std::sync::Arc;

use candlewick_model::Model;
use candlewick_parallel::{KindDeclaration, OPTIMIZER_KINDS, OptimizerKind, ParamPattern};
use serde::Serialize;
use serde_json::{Value, json};

use super::resolver::Resolver;
use crate::plan::{ModelPlan, OptimizerGroupPlan, OptimizerKindPlan, OptimizerPlan};
use crate::recipe::{OptimizerGroupSection, OptimizerType};

const GROUPS: &str = "optimizer.groups";

/// A kind of optimizer, and the numbers of each hyperparameter.
pub(super) struct ResolvedKind {
    declaration: &'static KindDeclaration,
    values: Vec<(&'static str, Vec<f64>)>,
}

impl ResolvedKind {
    /// Builds the kind; with defaults if a number is wrong, which has been reported.
    pub(super) fn build(&self) -> Arc<dyn OptimizerKind> {
        let values: Vec<(&str, &[f64])> = self.values.iter().map(|(name, numbers)| (*name, &numbers[..])).collect();
        self.declaration.with(&values).unwrap_or_else(|_| self.declaration.with_defaults())
    }
}

/// Returns the kind with this name in recipes.
pub(super) fn declaration(kind: OptimizerType) -> &'static KindDeclaration {
    let name = json!(kind);
    let has_name = |declaration: &&&KindDeclaration| declaration.recipe_names.iter().any(|own| name == **own);
    OPTIMIZER_KINDS.iter().find(has_name).unwrap_or(&OPTIMIZER_KINDS[0])
}

/// Resolves the hyperparameters of a kind, the keys of `section` at `path`. Those of `inherited` are defaults.
pub(super) fn resolve_kind(
    resolver: &mut Resolver,
    path: &str,
    declaration: &'static KindDeclaration,
    (section, inherited): (&impl Serialize, &[(&'static str, Vec<f64>)]),
) -> ResolvedKind {
    let section = serde_json::to_value(section).unwrap_or_default();
    let mut values = Vec::new();
    for hyperparameter in declaration.hyperparameters {
        let (key, name) = (format!("{path}.{}", hyperparameter.name), hyperparameter.name);
        let given = numbers(&section[name]);
        let default = inherited.iter().find(|(other, _)| *other == name);
        let default = default.map_or(hyperparameter.default.to_vec(), |(_, numbers)| numbers.clone());
        let numbers = given.clone().unwrap_or(default);
        let shown = if let [number] = numbers[..] { json!(number) } else { json!(numbers) };
        resolver.pick(&key, given.map(|_| shown.clone()), shown);
        if let Err(problem) = hyperparameter.check(&numbers) {
            resolver.report(&[&key], format!("{key}: {problem}"));
        }
        values.push((name, numbers));
    }
    ResolvedKind { declaration, values }
}

/// Returns the numbers of a hyperparameter; `None` if the key is absent.
fn numbers(value: &Value) -> Option<Vec<f64>> {
    match value {
        Value::Null => None,
        Value::Array(numbers) => Some(numbers.iter().filter_map(Value::as_f64).collect()),
        number => number.as_f64().map(|number| vec![number]),
    }
}

/// Resolves a group of parameters; unset hyperparameters are those of all parameters.
pub(super) fn resolve_group(
    resolver: &mut Resolver,
    (i, group): (usize, &OptimizerGroupSection),
    (learning_rate, all): (f64, &ResolvedKind),
) -> OptimizerGroupPlan {
    let path = format!("{GROUPS}.{i}");
    let key = |name: &str| format!("{path}.{name}");
    let name = resolver.pick(&key("name"), group.name.clone(), format!("group_{i}"));
    let pattern = resolve_pattern(resolver, &path, group);
    let declaration = group.kind.map_or(all.declaration, declaration);
    if let Some(kind) = group.kind {
        resolver.pick(&key("type"), Some(kind), kind);
    }
    let factor = group.learning_rate_factor.map_or(1.0, |factor| factor.0);
    if group.learning_rate.is_some() && group.learning_rate_factor.is_some() {
        let message = format!("{path}: learning_rate and learning_rate_factor exclude each other");
        resolver.report_with_advice(&[&key("learning_rate_factor")], message, "keep one of them");
    }
    let keys = ["learning_rate", "lr", "learning_rate_factor"].map(key);
    let origin = resolver.loaded.origin(&keys.each_ref().map(String::as_str));
    let rate = group.learning_rate.map_or(factor * learning_rate, |rate| rate.0);
    let rate = resolver.record(&keys[0], rate, origin);
    if !(rate >= 0.0 && rate.is_finite()) {
        resolver
            .report(&keys.each_ref().map(String::as_str), format!("{}: expected at least 0, found {rate}", keys[0]));
    }
    let weight_decay =
        group.weight_decay.map(|decay| resolver.number(&key("weight_decay"), Some(decay), decay.0, 0.0, f64::MAX));
    let inherited = if declaration.name == all.declaration.name { &all.values[..] } else { &[] };
    let kind = OptimizerKindPlan(resolve_kind(resolver, &path, declaration, (group, inherited)).build());
    OptimizerGroupPlan { name, pattern, learning_rate: rate, weight_decay, kind }
}

fn resolve_pattern(resolver: &mut Resolver, path: &str, group: &OptimizerGroupSection) -> String {
    let key = format!("{path}.pattern");
    let Some(pattern) = group.pattern.clone() else {
        let advice = "set a regular expression of parameter names, such as embed_tokens|lm_head";
        resolver.report_with_advice(&[path], format!("{path} has no pattern"), advice);
        return String::new();
    };
    if let Err(problem) = ParamPattern::parse(&pattern) {
        resolver.report(&[&key], format!("{key}: {pattern:?} is no regular expression: {problem}"));
    }
    resolver.pick(&key, Some(pattern.clone()), pattern)
}

/// Refuses stochastic rounding with a kind of optimizer that does not round so.
pub(super) fn check_rounding(resolver: &mut Resolver, optimizer: &OptimizerPlan) {
    const KEY: &str = "optimizer.bf16_stochastic_round";
    let of_groups = optimizer.groups.iter().map(|group| &group.kind.0);
    let mut kinds = of_groups.chain([&optimizer.kind.0]).filter(|kind| !kind.rounds_stochastically());
    if let Some(kind) = kinds.next().filter(|_| optimizer.bf16_stochastic_round) {
        let message = format!("{KEY}: {} rounds to the nearest number", kind.name());
        resolver.report_with_advice(&[KEY, "optimizer.type"], message, "remove the key");
    }
}

/// Checks that every group has parameters that its optimizer can update, and that names differ.
pub(super) fn check_groups(resolver: &mut Resolver, model: &ModelPlan, optimizer: &OptimizerPlan) {
    let mut names = BTreeSet::new();
    for (i, group) in optimizer.groups.iter().enumerate().filter(|(_, group)| !names.insert(&group.name)) {
        let key = format!("{GROUPS}.{i}.name");
        resolver.report(&[&key], format!("{key}: another group has the name {:?}", group.name));
    }
    let is_valid = optimizer.groups.iter().all(|group| ParamPattern::parse(&group.pattern).is_ok());
    let model = model.config.clone().map(|config| Model::new(config, model.adapter.clone()));
    let Some(Ok(model)) = model.filter(|_| is_valid) else { return };
    let trained = || model.units().iter().flat_map(|unit| &unit.params).filter(|spec| spec.trainable);
    let groups = optimizer.groups();
    if let Err(error) = groups.check_kinds(trained()).and_then(|()| groups.check_patterns(trained())) {
        let keys = [format!("{GROUPS}.{}.pattern", error.group_idx), "optimizer.type".to_owned()];
        let advice = format!("the names are like {}", trained().next().map_or("none", |spec| spec.name.as_str()));
        let message = format!("optimizer: {}", error.problem);
        resolver.report_with_advice(&keys.each_ref().map(String::as_str), message, advice);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_recipe_name_of_a_kind_is_a_type_of_the_recipe() {
        for kind in OPTIMIZER_KINDS {
            for name in kind.recipe_names {
                let word: OptimizerType = serde_json::from_value(json!(name)).unwrap();
                assert_eq!(declaration(word).name, kind.name, "{name}");
            }
        }
    }
}
