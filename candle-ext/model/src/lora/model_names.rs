//! Names of a model's modules and parameters that LoRA may target.

use std::collections::HashSet;
use std::fmt;

use candlewick_text::suggestion::did_you_mean;

use super::names::suffixes;
use crate::{Config, LinearSpec};

/// Names of the modules and parameters of some layers that adapters may target.
#[derive(Clone, Debug, Default)]
pub struct AdapterNames {
    /// Linear layers.
    pub(crate) linears: Vec<String>,
    /// Routers and experts, with their names in transformers 4.
    pub(crate) of_experts: Vec<String>,
    /// Weights of linear layers and routers, and the 3-D parameters of experts in transformers 5.
    pub(crate) parameters: Vec<String>,
    /// Names in the first layer with experts, for messages.
    pub(crate) example_of_experts: Option<[String; 2]>,
}

impl AdapterNames {
    /// Returns the names of linear layers, and of their weights.
    pub fn of_linears(linears: &[&LinearSpec]) -> Self {
        Self {
            linears: linears.iter().map(|linear| linear.module.clone()).collect(),
            parameters: linears.iter().map(|linear| linear.weight_name()).collect(),
            ..Self::default()
        }
    }

    /// Adds the names of another sublayer.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.linears.extend(other.linears);
        self.of_experts.extend(other.of_experts);
        self.parameters.extend(other.parameters);
        self.example_of_experts = self.example_of_experts.or(other.example_of_experts);
        self
    }
}

/// Names of the modules and parameters of all layers.
pub(crate) struct ModelNames {
    pub(super) n_layers: usize,
    /// Last components of the linear layers' names in the first layer.
    short: Vec<String>,
    names: AdapterNames,
}

impl ModelNames {
    pub(super) fn of(config: &Config) -> Self {
        let n_layers = config.n_layers();
        let mut layers = (0..n_layers).map(|layer_idx| config.layer(layer_idx).adapter_names());
        let first = layers.next().unwrap_or_default();
        let last = |module: &String| module.rsplit('.').next().unwrap_or_default().to_string();
        let short = first.linears.iter().map(last).collect();
        Self { n_layers, short, names: layers.fold(first, AdapterNames::and) }
    }

    /// Returns the names of the linear layers.
    pub(super) fn linears(&self) -> impl Iterator<Item = &String> {
        self.names.linears.iter()
    }

    /// Returns the names of routers and experts.
    pub(super) fn of_experts(&self) -> impl Iterator<Item = &String> {
        self.names.of_experts.iter()
    }

    /// Returns the names of all modules and parameters.
    pub(super) fn all(&self) -> impl Iterator<Item = &String> {
        self.modules().chain(&self.names.parameters)
    }

    /// Returns the names of all modules.
    pub(super) fn modules(&self) -> impl Iterator<Item = &String> {
        self.names.linears.iter().chain(&self.names.of_experts)
    }

    /// Returns the first of `targets` that is neither a module nor its end. `others` are further modules.
    pub(super) fn unmatched_module<'t>(&self, targets: &'t [String], others: &[&str]) -> Option<&'t String> {
        unmatched(targets, self.modules().map(String::as_str).chain(others.iter().copied()))
    }

    /// Returns the first of `targets` that is neither a parameter nor its end.
    pub(super) fn unmatched_parameter<'t>(&self, targets: &'t [String]) -> Option<&'t String> {
        unmatched(targets, self.names.parameters.iter().map(String::as_str))
    }

    /// Returns advice for a target that matches no module.
    pub(super) fn hint_for_module(&self, name: &str) -> String {
        match self.names.parameters.iter().any(|parameter| suffixes(parameter).any(|end| end == name)) {
            true => "; it is a parameter: name it in target_parameters".to_owned(),
            false => did_you_mean(name, ends(self.modules(), name)),
        }
    }

    /// Returns advice for a target that matches no parameter.
    pub(super) fn hint_for_parameter(&self, name: &str) -> String {
        match self.modules().any(|module| suffixes(module).any(|end| end == name)) {
            true => "; it is a module: name it in target_modules".to_owned(),
            false => did_you_mean(name, ends(self.names.parameters.iter(), name)),
        }
    }
}

impl fmt::Display for ModelNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (short, last) = (self.short.join(", "), self.n_layers - 1);
        write!(f, "the linear layers are {short}, named like {}, for layers 0 to {last}", self.names.linears[0])?;
        match &self.names.example_of_experts {
            Some([modules, parameters]) => write!(f, "; modules of experts are {modules}, parameters {parameters}"),
            None => Ok(()),
        }
    }
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
