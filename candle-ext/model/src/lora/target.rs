//! Selection of the linear layers that get LoRA, and of their ranks, by PEFT's rules.

use candlewick_text::suggestion::did_you_mean;

use super::names::{Names, has_suffix, is_match};
use super::{AdapterSpec, LoraConfig};
use crate::{Config, ModelError};

impl LoraConfig {
    /// Returns the adapters in layer order.
    pub(crate) fn targets(&self, config: &Config) -> Result<Vec<AdapterSpec>, ModelError> {
        self.refuse_embeddings()?;
        self.refuse_unmatched(config)?;
        self.refuse_idle(config)?;
        let mut adapters = Vec::new();
        for block_idx in (0..config.n_layers()).filter(|block_idx| self.transforms(*block_idx)) {
            for linear in config.layer(block_idx).linears() {
                if self.hits(&linear.module)? {
                    adapters.push(self.adapter(linear.module.clone())?);
                }
            }
        }
        match adapters.is_empty() {
            true => Err(ModelError::lora("target_modules", format!("no module matches; {}", these_are_there(config)))),
            false => Ok(adapters),
        }
    }

    fn transforms(&self, block_idx: usize) -> bool {
        self.layers_to_transform.as_ref().is_none_or(|layers| layers.contains(&block_idx))
    }

    fn hits(&self, module: &str) -> Result<bool, ModelError> {
        if let Some(excluded) = &self.exclude_modules
            && excluded.matches("exclude_modules", module)?
        {
            return Ok(false);
        }
        self.target_modules.matches("target_modules", module)
    }

    fn adapter(&self, module: String) -> Result<AdapterSpec, ModelError> {
        let r = first_match("rank_pattern", &self.rank_pattern, &module)?.unwrap_or(self.r);
        let alpha = first_match("alpha_pattern", &self.alpha_pattern, &module)?.unwrap_or(self.lora_alpha);
        let scaling = alpha / if self.use_rslora { (r as f64).sqrt() } else { r as f64 };
        Ok(AdapterSpec { module, r, scaling, dropout: self.lora_dropout })
    }

    /// Rejects embedding and output layer as targets. The loss is fused with the output layer, and the embedding is a
    /// lookup.
    fn refuse_embeddings(&self) -> Result<(), ModelError> {
        for module in ["lm_head", "model.embed_tokens"] {
            if self.target_modules != Names::AllLinear && self.hits(module)? {
                let problem = format!("an adapter on `{module}` is not supported; name linear layers of the blocks");
                return Err(ModelError::lora("target_modules", problem));
            }
        }
        Ok(())
    }

    /// Rejects a target name that matches no module; a misspelled name would train fewer layers.
    fn refuse_unmatched(&self, config: &Config) -> Result<(), ModelError> {
        let Names::List(list) = &self.target_modules else { return Ok(()) };
        let modules = modules(config);
        match list.iter().find(|name| !modules.iter().any(|module| has_suffix(module, name))) {
            Some(name) => {
                let hint = did_you_mean(name, short_names(config).iter().map(String::as_str));
                let problem = format!("`{name}` matches no module{hint}; {}", these_are_there(config));
                Err(ModelError::lora("target_modules", problem))
            }
            None => Ok(()),
        }
    }
}

impl LoraConfig {
    /// Rejects a pattern, exclusion or layer index that matches nothing.
    fn refuse_idle(&self, config: &Config) -> Result<(), ModelError> {
        let last = config.n_layers() - 1;
        if let Some(layer) = self.layers_to_transform.iter().flatten().find(|layer| **layer > last) {
            let problem = format!("there is no layer {layer}; the last one is {last}");
            return Err(ModelError::lora("layers_to_transform", problem));
        }
        let modules = modules(config);
        let ranks = self.rank_pattern.iter().map(|(name, _)| ("rank_pattern", name));
        let alphas = self.alpha_pattern.iter().map(|(name, _)| ("alpha_pattern", name));
        for (key, name) in ranks.chain(alphas) {
            let pattern = [(name.clone(), ())];
            let hits = modules.iter().map(|module| first_match(key, &pattern, module));
            if hits.collect::<Result<Vec<_>, _>>()?.iter().all(Option::is_none) {
                return Err(ModelError::lora(key, format!("`{name}` matches no module; {}", these_are_there(config))));
            }
        }
        let Some(Names::List(excluded)) = &self.exclude_modules else { return Ok(()) };
        let outside = ["lm_head", "model.embed_tokens"].map(str::to_string);
        let all: Vec<&String> = modules.iter().chain(&outside).collect();
        match excluded.iter().find(|name| !all.iter().any(|module| has_suffix(module, name))) {
            Some(name) => {
                let problem = format!("`{name}` matches no module; {}", these_are_there(config));
                Err(ModelError::lora("exclude_modules", problem))
            }
            None => Ok(()),
        }
    }
}

/// Returns the names of the linear layers of all decoder layers.
fn modules(config: &Config) -> Vec<String> {
    (0..config.n_layers()).flat_map(|layer_idx| layer_modules(config, layer_idx)).collect()
}

fn layer_modules(config: &Config, layer_idx: usize) -> Vec<String> {
    config.layer(layer_idx).linears().map(|linear| linear.module.clone()).collect()
}

fn short_names(config: &Config) -> Vec<String> {
    let last = |module: &str| module.rsplit('.').next().unwrap_or_default().to_string();
    layer_modules(config, 0).iter().map(|module| last(module)).collect()
}

fn these_are_there(config: &Config) -> String {
    format!(
        "the linear layers are {}, named like {}, for layers 0 to {}",
        short_names(config).join(", "),
        layer_modules(config, 0)[0],
        config.n_layers() - 1
    )
}

fn first_match<T: Copy>(key: &str, patterns: &[(String, T)], module: &str) -> Result<Option<T>, ModelError> {
    for (name, value) in patterns {
        if is_match(key, &format!(r"^(.*\.)?({name})$"), module)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}
