//! Rules that select modules and parameters for LoRA, and their ranks, as PEFT's. Sublayers apply them to their parts.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};

use super::model_names::ModelNames;
use super::names::{NameMatcher, NamePattern, Names, suffixes};
use super::{AdapterSpec, LoraConfig, factors};
use crate::family::multimodal::name_in_multimodal_model;
use crate::{Config, LinearSpec, ModelError, ParamScope, ParamSpec};

/// The compiled rules of a [`LoraConfig`].
pub struct LoraTargets<'a> {
    config: &'a LoraConfig,
    modules: NameMatcher<'a>,
    excluded: Option<NameMatcher<'a>>,
    ranks: Vec<(NamePattern, usize)>,
    alphas: Vec<(NamePattern, f64)>,
    /// Names of modules and parameters that got an adapter.
    adapted: RefCell<BTreeSet<String>>,
}

impl<'a> LoraTargets<'a> {
    /// Compiles the rules.
    ///
    /// # Errors
    /// If a name or pattern matches nothing in `names`, or names the embedding or output layer.
    pub(super) fn new(config: &'a LoraConfig, names: &ModelNames) -> Result<Self, ModelError> {
        let targets = Self {
            config,
            modules: config.target_modules.matcher("target_modules")?,
            excluded: config.exclude_modules.as_ref().map(|names| names.matcher("exclude_modules")).transpose()?,
            ranks: patterns("rank_pattern", &config.rank_pattern)?,
            alphas: patterns("alpha_pattern", &config.alpha_pattern)?,
            adapted: RefCell::default(),
        };
        targets.refuse_embeddings()?;
        config.refuse_unmatched(names)?;
        targets.refuse_idle(names)?;
        Ok(targets)
    }

    /// Adds adapters to the linear layers of layer `layer_idx` that match. Returns their factors.
    pub(crate) fn attach_linears<'l>(
        &self,
        linears: impl IntoIterator<Item = &'l mut LinearSpec>,
        layer_idx: usize,
        scope: ParamScope,
    ) -> Result<Vec<ParamSpec>, ModelError> {
        let transforms = self.transforms(layer_idx);
        let params = linears.into_iter().map(|linear| self.linear(linear, transforms, scope));
        Ok(params.collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// Returns true if the rules select modules of layer `layer_idx`.
    pub(crate) fn transforms(&self, layer_idx: usize) -> bool {
        self.config.transforms(layer_idx)
    }

    /// Returns the configuration.
    pub(crate) fn config(&self) -> &LoraConfig {
        self.config
    }

    /// Rejects a pattern of ranks or alphas that matches only modules without an adapter. Call it after the adapters of all
    /// layers are attached.
    fn refuse_unused_patterns(&self, names: &ModelNames) -> Result<(), ModelError> {
        const SHOWN: usize = 3;
        let adapted = self.adapted.borrow();
        for pattern in self.patterns() {
            let is_match = |name: &&String| pattern.is_match(name).unwrap_or(true);
            if adapted.iter().any(|name| is_match(&name)) {
                continue;
            }
            let matched: Vec<&str> = names.all().filter(is_match).map(String::as_str).take(SHOWN + 1).collect();
            let more = if matched.len() > SHOWN { ", ..." } else { "" };
            let problem = format!(
                "`{}` matches only modules without an adapter: {}{more}; select them in target_modules, or remove the pattern",
                pattern.text(),
                matched[..matched.len().min(SHOWN)].join(", ")
            );
            return Err(ModelError::lora(pattern.key(), problem));
        }
        Ok(())
    }

    /// Returns the linear layers that `target_modules` selects, by the shortest ends of their names that no other module has.
    fn module_names(&self, names: &ModelNames) -> Result<Vec<String>, ModelError> {
        let hits =
            names.linears().map(|module| Ok((module, self.hits(module)?))).collect::<Result<Vec<_>, ModelError>>()?;
        let unselected = hits.iter().filter(|(_, hit)| !hit).map(|(module, _)| *module).chain(names.of_experts());
        let unselected = unselected.map(String::as_str).chain(["lm_head", "model.embed_tokens"]);
        let taken: HashSet<&str> = unselected.flat_map(suffixes).collect();
        let selected = hits.iter().filter(|(_, hit)| *hit).map(|(module, _)| module.as_str());
        let shortest = |module| suffixes(module).filter(|end| !taken.contains(end)).last().unwrap_or(module);
        Ok(selected.map(shortest).map(str::to_owned).collect::<BTreeSet<_>>().into_iter().collect())
    }

    /// Returns the patterns of ranks and alphas.
    fn patterns(&self) -> impl Iterator<Item = &NamePattern> {
        self.ranks.iter().map(|(pattern, _)| pattern).chain(self.alphas.iter().map(|(pattern, _)| pattern))
    }

    /// Adds an adapter to a linear layer that matches. Returns its factors.
    fn linear(
        &self,
        linear: &mut LinearSpec,
        transforms: bool,
        scope: ParamScope,
    ) -> Result<Vec<ParamSpec>, ModelError> {
        let by_module = transforms && self.hits(&linear.module)?;
        let weight = linear.weight_name();
        let name = match (by_module, self.hits_parameter(&weight)) {
            (true, true) => return Err(targeted_twice(&weight)),
            (false, false) => return Ok(Vec::new()),
            (true, false) => &linear.module,
            (false, true) => &weight,
        };
        let adapter = self.adapter(&linear.module, name)?;
        let params = factors(&adapter, [linear.out, linear.input], scope);
        linear.adapter = Some(adapter);
        Ok(params.into())
    }

    /// Returns true if a linear layer matches.
    fn hits(&self, module: &str) -> Result<bool, ModelError> {
        match &self.excluded {
            Some(excluded) if excluded.matches(module)? => Ok(false),
            _ => self.modules.matches(module),
        }
    }

    /// Returns true if a router or expert matches by its name. `all-linear` does not include them.
    pub(crate) fn hits_named(&self, module: &str) -> Result<bool, ModelError> {
        Ok(!matches!(self.modules, NameMatcher::AllLinear) && self.hits(module)?)
    }

    /// Returns true if a parameter matches by its name.
    pub(crate) fn hits_parameter(&self, name: &str) -> bool {
        let targets = &self.config.target_parameters;
        !targets.is_empty() && suffixes(name).any(|suffix| targets.iter().any(|target| target == suffix))
    }

    /// Returns the adapter `module`, whose rank and alpha are those of the patterns that match `name`.
    pub(crate) fn adapter(&self, module: &str, name: &str) -> Result<AdapterSpec, ModelError> {
        self.adapted.borrow_mut().insert(name.to_owned());
        let r = first_match(&self.ranks, name)?.unwrap_or(self.config.r);
        let alpha = first_match(&self.alphas, name)?.unwrap_or(self.config.lora_alpha);
        let scaling = alpha / if self.config.use_rslora { (r as f64).sqrt() } else { r as f64 };
        Ok(AdapterSpec { module: module.to_owned(), r, scaling, dropout: self.config.lora_dropout })
    }

    /// Rejects embedding and output layer as targets. The loss is fused with the output layer, and the embedding is a
    /// lookup.
    fn refuse_embeddings(&self) -> Result<(), ModelError> {
        for module in ["lm_head", "model.embed_tokens"] {
            if self.hits_named(module)? {
                let problem = format!("an adapter on `{module}` is not supported; name linear layers of the blocks");
                return Err(ModelError::lora("target_modules", problem));
            }
        }
        Ok(())
    }

    /// Rejects a pattern, exclusion or layer index that matches nothing.
    fn refuse_idle(&self, names: &ModelNames) -> Result<(), ModelError> {
        let last = names.n_layers - 1;
        if let Some(layer) = self.config.layers_to_transform.iter().flatten().find(|layer| **layer > last) {
            let problem = format!("there is no layer {layer}; the last one is {last}");
            return Err(ModelError::lora("layers_to_transform", problem));
        }
        for pattern in self.patterns() {
            let mut hits = names.all().map(|name| pattern.is_match(name));
            if !hits.any(|hit| !matches!(hit, Ok(false))) {
                let problem = format!("`{}` matches no module; {names}", pattern.text());
                return Err(ModelError::lora(pattern.key(), problem));
            }
        }
        let Some(Names::List(excluded)) = &self.config.exclude_modules else { return Ok(()) };
        match names.unmatched_module(excluded, &["lm_head", "model.embed_tokens"]) {
            Some(name) => Err(ModelError::lora("exclude_modules", format!("`{name}` matches no module; {names}"))),
            None => Ok(()),
        }
    }
}

impl LoraConfig {
    /// Returns the names that this configuration may select.
    pub(crate) fn names(&self, config: &Config) -> ModelNames {
        ModelNames::of(config)
    }

    /// Compiles the rules that select adapters.
    ///
    /// # Errors
    /// If a name or pattern matches none of `names`.
    pub(crate) fn targets(&self, names: &ModelNames) -> Result<LoraTargets<'_>, ModelError> {
        LoraTargets::new(self, names)
    }

    /// Verifies that each pattern of a new adapter's ranks and alphas matches a module with an adapter. PEFT ignores other
    /// patterns, so a stored configuration may have some.
    ///
    /// # Errors
    /// If a pattern matches only modules without an adapter.
    pub fn check_patterns(&self, config: &Config) -> Result<(), ModelError> {
        let names = self.names(config);
        let targets = self.targets(&names)?;
        for layer_idx in 0..config.n_layers() {
            config.layer(layer_idx).attach(&targets)?;
        }
        targets.refuse_unused_patterns(&names)
    }

    /// Returns the configuration with the names of the selected modules in place of `all-linear`, as PEFT saves it. Other
    /// programs expect names.
    pub(super) fn with_module_names(&self, config: &Config) -> Result<Self, ModelError> {
        if self.target_modules != Names::AllLinear {
            return Ok(self.clone());
        }
        let names = self.names(config);
        let target_modules = Names::List(self.targets(&names)?.module_names(&names)?);
        Ok(Self { target_modules, ..self.clone() })
    }

    /// Returns the configuration with the full names of these modules in a multimodal model. A shorter name could match modules
    /// of its vision tower.
    pub(super) fn with_multimodal_names<'m>(&self, modules: impl Iterator<Item = &'m str>) -> Self {
        let names: BTreeSet<String> = modules.map(name_in_multimodal_model).collect();
        Self {
            target_modules: Names::List(names.into_iter().collect()),
            target_parameters: Vec::new(),
            exclude_modules: None,
            layers_to_transform: None,
            rank_pattern: with_multimodal_keys(&self.rank_pattern),
            alpha_pattern: with_multimodal_keys(&self.alpha_pattern),
            ..self.clone()
        }
    }

    /// Returns the error of a configuration that selects nothing.
    pub(crate) fn without_target(&self, names: &ModelNames) -> ModelError {
        ModelError::lora("target_modules", format!("no module matches; {names}"))
    }

    fn transforms(&self, block_idx: usize) -> bool {
        self.layers_to_transform.as_ref().is_none_or(|layers| layers.contains(&block_idx))
    }

    /// Rejects a target name that matches nothing; a misspelled name would train fewer layers.
    fn refuse_unmatched(&self, names: &ModelNames) -> Result<(), ModelError> {
        if let Names::List(list) = &self.target_modules
            && let Some(name) = names.unmatched_module(list, &[])
        {
            let problem = format!("`{name}` matches no module{}; {names}", names.hint_for_module(name));
            return Err(ModelError::lora("target_modules", problem));
        }
        match names.unmatched_parameter(&self.target_parameters) {
            Some(name) => {
                let problem = format!("`{name}` matches no parameter{}; {names}", names.hint_for_parameter(name));
                Err(ModelError::lora("target_parameters", problem))
            }
            None => Ok(()),
        }
    }
}

/// Returns the error of a parameter that two rules select.
pub(crate) fn targeted_twice(parameter: &str) -> ModelError {
    let problem = format!("`{parameter}` is also selected by target_modules; keep one of them");
    ModelError::lora("target_parameters", problem)
}

fn patterns<T: Copy>(key: &'static str, patterns: &[(String, T)]) -> Result<Vec<(NamePattern, T)>, ModelError> {
    patterns.iter().map(|(text, value)| Ok((NamePattern::suffix(key, text)?, *value))).collect()
}

fn first_match<T: Copy>(patterns: &[(NamePattern, T)], name: &str) -> Result<Option<T>, ModelError> {
    for (pattern, value) in patterns {
        if pattern.is_match(name)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}
/// Returns patterns whose full names are those of a multimodal model. Ends of names stay.
fn with_multimodal_keys<T: Copy>(patterns: &[(String, T)]) -> Vec<(String, T)> {
    let key = |text: &str| match text.strip_prefix(r"model\.") {
        Some(rest) if !rest.starts_with("language_model") => format!(r"model\.language_model\.{rest}"),
        _ => name_in_multimodal_model(text),
    };
    patterns.iter().map(|(text, value)| (key(text), *value)).collect()
}
