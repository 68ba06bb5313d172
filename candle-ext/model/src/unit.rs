//! FSDP units of a model (embedding, layers, MTP layers, head) with the names and shapes of their parameters.

use candlewick_ops::WeightStorage;

use crate::{
    AdapterSpec, Config, Dim, DimSize, ExpertMatrixSpec, Init, LayerSpec, LinearSpec, LoraConfig, ModelError,
    ParamScope, ParamSpec, mtp,
};

/// Parameters that are all-gathered, computed and freed together, as by FSDP's `fully_shard`.
#[derive(Clone, Debug, PartialEq)]
pub struct FsdpUnit {
    /// Name of the unit: `embed`, `block 0`, `mtp 1` or `head`.
    pub name: String,
    /// Kind of the unit.
    pub kind: FsdpUnitKind,
    /// Parameters that this unit owns.
    pub params: Vec<ParamSpec>,
    /// Parameters of other units that the pipeline stage of this unit also needs, such as tied embeddings.
    pub tied: Vec<TiedParam>,
}

/// Kind of an FSDP unit.
#[derive(Clone, Debug, PartialEq)]
pub enum FsdpUnitKind {
    /// Token embedding.
    Embedding,
    /// A decoder layer.
    Layer(Box<LayerSpec>),
    /// A layer for multi-token prediction, with this decoder layer.
    Mtp(Box<LayerSpec>),
    /// Final norm and output layer (`lm_head`).
    Head {
        /// Epsilon of the final norm.
        norm_eps: f64,
    },
    /// Parameters that a caller outside of this crate reads by name.
    Named,
}

impl FsdpUnit {
    /// Returns the decoder layer of the unit: a layer of the model, or that of an MTP layer.
    pub fn layer(&self) -> Option<&LayerSpec> {
        match &self.kind {
            FsdpUnitKind::Layer(layer) | FsdpUnitKind::Mtp(layer) => Some(layer),
            FsdpUnitKind::Embedding | FsdpUnitKind::Head { .. } | FsdpUnitKind::Named => None,
        }
    }

    fn layer_mut(&mut self) -> Option<&mut LayerSpec> {
        match &mut self.kind {
            FsdpUnitKind::Layer(layer) | FsdpUnitKind::Mtp(layer) => Some(layer),
            FsdpUnitKind::Embedding | FsdpUnitKind::Head { .. } | FsdpUnitKind::Named => None,
        }
    }

    /// Returns the linear layers of the unit's decoder layer.
    pub(crate) fn linears_mut(&mut self) -> impl Iterator<Item = &mut LinearSpec> {
        self.layer_mut().into_iter().flat_map(LayerSpec::linears_mut)
    }

    /// Returns the matrices of the routed experts of the unit's decoder layer.
    pub(crate) fn expert_matrices_mut(&mut self) -> impl Iterator<Item = &mut ExpertMatrixSpec> {
        self.layer_mut().into_iter().flat_map(|layer| layer.mlp.expert_matrices_mut())
    }

    /// Removes the bias `name`. Under tensor parallelism one rank alone adds the bias of a row-parallel layer.
    pub fn remove_bias(&mut self, name: &str) {
        self.params.retain(|param| param.name != name);
        let Some(layer) = self.layer_mut() else { return };
        layer.linears_mut().filter(|linear| linear.bias_name() == name).for_each(|linear| linear.bias = false);
    }

    /// Sets the storage of the frozen weights of linear layers and experts. Biases, norms, routers and adapters stay
    /// dense.
    pub(crate) fn store_frozen(&mut self, storage: WeightStorage) {
        let (FsdpUnitKind::Layer(layer) | FsdpUnitKind::Mtp(layer)) = &mut self.kind else { return };
        for matrix in layer.mlp.expert_matrices_mut() {
            for param in self.params.iter_mut().filter(|param| param.name == matrix.name && !param.trainable) {
                (param.storage, matrix.storage) = (storage, storage);
            }
        }
        for linear in layer.linears_mut() {
            let name = linear.weight_name();
            for param in self.params.iter_mut().filter(|param| param.name == name && !param.trainable) {
                (param.storage, linear.storage) = (storage, storage);
            }
        }
    }

    /// Returns the tied parameters that this unit itself reads. An output layer of its own leaves the embedding to MTP layers.
    pub fn read_ties(&self) -> impl Iterator<Item = &TiedParam> {
        self.tied.iter().filter(|tied| !(tied.name == EMBEDDING && self.has_own_output()))
    }

    /// Returns true if the unit has an output layer of its own.
    pub(crate) fn has_own_output(&self) -> bool {
        self.params.iter().any(|param| param.name == LM_HEAD)
    }

    /// Returns the LoRA adapters of the unit.
    pub fn adapters(&self) -> impl Iterator<Item = &AdapterSpec> {
        self.layer().into_iter().flat_map(LayerSpec::adapters)
    }
}

/// A parameter that another unit owns, such as tied embeddings in the output layer.
#[derive(Clone, Debug, PartialEq)]
pub struct TiedParam {
    /// Index of the owning unit.
    pub owner: usize,
    /// Name of the parameter, equal in both units.
    pub name: String,
}

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const FINAL_NORM: &str = "model.norm.weight";
pub(crate) const LM_HEAD: &str = "lm_head.weight";

/// Returns the names of the copies of a parameter that MTP layers have on the Hub: of the embedding and of the output layer.
pub(crate) fn copies_in_mtp_layers(config: &Config, name: &str) -> Vec<String> {
    let of_output = if config.tied() { EMBEDDING } else { LM_HEAD };
    let first = config.n_layers();
    let of_layer = |layer_idx: usize| {
        let copies = [("embed_tokens", EMBEDDING), ("shared_head.head", of_output)];
        let own = copies.into_iter().filter(move |(_, original)| *original == name);
        own.map(move |(module, _)| format!("model.layers.{layer_idx}.{module}.weight"))
    };
    (first..first + config.n_mtp_layers()).flat_map(of_layer).collect()
}

/// Returns all units. With LoRA the base is frozen and the units hold the factors, too.
pub(crate) fn units(config: &Config, lora: Option<&LoraConfig>) -> Result<Vec<FsdpUnit>, ModelError> {
    let n_layers = config.n_layers() + config.n_mtp_layers();
    let mut units = units_of(config, (0..n_layers).map(|layer_idx| config.layer(layer_idx)).collect());
    if let Some(lora) = lora {
        attach(config, lora, &mut units)?;
    }
    Ok(units)
}

/// Returns the units of a model with these decoder layers, those of MTP layers last.
pub(crate) fn units_of(config: &Config, mut layers: Vec<LayerSpec>) -> Vec<FsdpUnit> {
    assert_eq!(layers.len(), config.n_layers() + config.n_mtp_layers(), "every layer has a specification");
    let mtp_layers = layers.split_off(config.n_layers());
    let mut units = vec![embed(config)];
    units.extend(layers.into_iter().map(|spec| layer(config, spec)));
    units.extend((1..).zip(mtp_layers).map(|(depth, spec)| mtp_layer(config, depth, spec)));
    units.push(head(config));
    units
}

/// Freezes the base and adds the factors of the adapters.
fn attach(config: &Config, lora: &LoraConfig, units: &mut [FsdpUnit]) -> Result<(), ModelError> {
    units.iter_mut().flat_map(|unit| &mut unit.params).for_each(|param| param.trainable = false);
    let names = lora.names(config);
    let targets = lora.targets(&names)?;
    for unit in units.iter_mut() {
        let FsdpUnitKind::Layer(layer) = &mut unit.kind else { continue };
        unit.params.extend(layer.attach(&targets)?);
    }
    match units.iter().any(|unit| unit.adapters().next().is_some()) {
        true => Ok(()),
        false => Err(lora.without_target(&names)),
    }
}

fn embed(config: &Config) -> FsdpUnit {
    let zero_row = config.typed.pad_id.map(|id| id as usize);
    let init = Init::Normal { std: config.typed.initializer_range, zero_row };
    let params = vec![ParamSpec { init, ..vocabulary(EMBEDDING, config) }];
    FsdpUnit { name: "embed".to_string(), kind: FsdpUnitKind::Embedding, params, tied: Vec::new() }
}

fn layer(config: &Config, layer: LayerSpec) -> FsdpUnit {
    let layer_idx = layer.layer_idx;
    let params = layer.params(config.typed.initializer_range);
    let kind = FsdpUnitKind::Layer(Box::new(layer));
    FsdpUnit { name: format!("block {layer_idx}"), kind, params, tied: Vec::new() }
}

/// The MTP layer that predicts `depth` tokens further than the model. Its decoder layer has the shape of the model's
/// last.
fn mtp_layer(config: &Config, depth: usize, layer: LayerSpec) -> FsdpUnit {
    let params = mtp::params(config, &layer);
    FsdpUnit { name: format!("mtp {depth}"), kind: FsdpUnitKind::Mtp(Box::new(layer)), params, tied: Vec::new() }
}

/// With MTP layers, which embed tokens on the last pipeline stage, the head ties the embedding.
fn head(config: &Config) -> FsdpUnit {
    let mut params = vec![ParamSpec::norm(FINAL_NORM.to_string(), config.embed(), ParamScope::ResidualStream)];
    let mut tied = Vec::new();
    if config.tied() || config.n_mtp_layers() > 0 {
        tied.push(TiedParam { owner: 0, name: EMBEDDING.to_string() });
    }
    if !config.tied() {
        params.push(vocabulary(LM_HEAD, config));
    }
    let kind = FsdpUnitKind::Head { norm_eps: config.typed.rms_norm_eps };
    FsdpUnit { name: "head".to_string(), kind, params, tied }
}

/// A row for each token.
fn vocabulary(name: &str, config: &Config) -> ParamSpec {
    let init = Init::Normal { std: config.typed.initializer_range, zero_row: None };
    let vocab = DimSize { dim: Dim::Vocab, len: config.typed.vocab_size };
    ParamSpec::matrix(name.to_string(), [vocab, config.embed()], ParamScope::ResidualStream, init)
}
