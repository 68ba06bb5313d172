//! Names of a model's modules and parameters that LoRA may target.

use std::collections::HashSet;
use std::fmt;

use candlewick_text::suggestion::did_you_mean;

use super::names::suffixes;
use crate::{Config, LayerSpec, LinearSpec, MlpSpec};

/// Names of the modules and parameters of all layers.
pub(crate) struct ModelNames {
    pub(super) n_layers: usize,
    linears: Vec<String>,
    /// Routers and experts, with their names in transformers 4.
    of_experts: Vec<String>,
    /// Weights of linear layers and routers, and the 3-D parameters of experts in transformers 5.
    parameters: Vec<String>,
    /// Last components of the linear layers' names in the first layer.
    short: Vec<String>,
    /// Names in the first layer with experts, for messages.
    example_of_experts: Option<[String; 2]>,
}

impl ModelNames {
    pub(super) fn of(config: &Config) -> Self {
        let layers: Vec<LayerSpec> = (0..config.n_layers()).map(|layer_idx| config.layer(layer_idx)).collect();
        let last = |module: &str| module.rsplit('.').next().unwrap_or_default().to_string();
        Self {
            n_layers: layers.len(),
            linears: layers.iter().flat_map(linears).map(|linear| linear.module.clone()).collect(),
            of_experts: layers.iter().flat_map(modules_of_experts).collect(),
            parameters: layers.iter().flat_map(parameters).collect(),
            short: linears(&layers[0]).map(|linear| last(&linear.module)).collect(),
            example_of_experts: layers.iter().find_map(example_of_experts),
        }
    }

    /// Returns the names of the linear layers.
    pub(super) fn linears(&self) -> impl Iterator<Item = &String> {
        self.linears.iter()
    }

    /// Returns the names of routers and experts.
    pub(super) fn of_experts(&self) -> impl Iterator<Item = &String> {
        self.of_experts.iter()
    }

    /// Returns the names of all modules and parameters.
    pub(super) fn all(&self) -> impl Iterator<Item = &String> {
        self.modules().chain(&self.parameters)
    }

    /// Returns the names of all modules.
    pub(super) fn modules(&self) -> impl Iterator<Item = &String> {
        self.linears.iter().chain(&self.of_experts)
    }

    /// Returns the first of `targets` that is neither a module nor its end. `others` are further modules.
    pub(super) fn unmatched_module<'t>(&self, targets: &'t [String], others: &[&str]) -> Option<&'t String> {
        unmatched(targets, self.modules().map(String::as_str).chain(others.iter().copied()))
    }

    /// Returns the first of `targets` that is neither a parameter nor its end.
    pub(super) fn unmatched_parameter<'t>(&self, targets: &'t [String]) -> Option<&'t String> {
        unmatched(targets, self.parameters.iter().map(String::as_str))
    }

    /// Returns advice for a target that matches no module.
    pub(super) fn hint_for_module(&self, name: &str) -> String {
        match self.parameters.iter().any(|parameter| suffixes(parameter).any(|end| end == name)) {
            true => "; it is a parameter: name it in target_parameters".to_owned(),
            false => did_you_mean(name, ends(self.modules(), name)),
        }
    }

    /// Returns advice for a target that matches no parameter.
    pub(super) fn hint_for_parameter(&self, name: &str) -> String {
        match self.modules().any(|module| suffixes(module).any(|end| end == name)) {
            true => "; it is a module: name it in target_modules".to_owned(),
            false => did_you_mean(name, ends(self.parameters.iter(), name)),
        }
    }
}

impl fmt::Display for ModelNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (short, last) = (self.short.join(", "), self.n_layers - 1);
        write!(f, "the linear layers are {short}, named like {}, for layers 0 to {last}", self.linears[0])?;
        match &self.example_of_experts {
            Some([modules, parameters]) => write!(f, "; modules of experts are {modules}, parameters {parameters}"),
            None => Ok(()),
        }
    }
}

/// Returns the linear layers with the gate of the shared expert.
fn linears(layer: &LayerSpec) -> impl Iterator<Item = &LinearSpec> {
    layer.linears().chain(layer.shared_expert_gate())
}

fn modules_of_experts(layer: &LayerSpec) -> Vec<String> {
    let MlpSpec::Moe(moe) = &layer.mlp else { return Vec::new() };
    let experts = moe.hub.linears.iter().flat_map(|linear| moe.expert_modules(linear));
    std::iter::once(moe.hub_router_module()).chain(experts).collect()
}

fn parameters(layer: &LayerSpec) -> Vec<String> {
    let mut names: Vec<String> = linears(layer).map(|linear| linear.weight_name()).collect();
    if let MlpSpec::Moe(moe) = &layer.mlp {
        names.extend([moe.router_weight.weight_name(), moe.gate_up.name.clone(), moe.down.name.clone()]);
    }
    names
}

/// Returns examples of modules and of parameters.
fn example_of_experts(layer: &LayerSpec) -> Option<[String; 2]> {
    let MlpSpec::Moe(moe) = &layer.mlp else { return None };
    let modules = moe.hub.linears.iter().filter_map(|linear| moe.expert_modules(linear).next());
    let modules = [moe.hub_router_module()].into_iter().chain(modules).collect::<Vec<_>>().join(", ");
    let parameters = [moe.router_weight.weight_name(), moe.gate_up.name.clone(), moe.down.name.clone()];
    Some([modules, parameters.join(", ")])
}

fn unmatched<'t, 'n>(targets: &'t [String], names: impl Iterator<Item = &'n str>) -> Option<&'t String> {
    if targets.is_empty() {
        return None;
    }
    let ends: HashSet<&str> = names.flat_map(suffixes).collect();
    targets.iter().find(|target| !ends.contains(target.as_str()))
}

/// Returns the ends of names with as many components as `like`.
fn ends<'n>(names: impl Iterator<Item = &'n String>, like: &str) -> HashSet<&'n str> {
    let n_dots = like.matches('.').count();
    names.flat_map(|name| suffixes(name)).filter(|end| end.matches('.').count() == n_dots).collect()
}
