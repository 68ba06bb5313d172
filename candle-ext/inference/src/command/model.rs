//! The model that a command loads, and what computes it.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use candle_core::{DType, Device};
use candlewick_model::Config;
use candlewick_model::checkpoint::Checkpoint;
use candlewick_ops::{AttentionChoice, AttentionImpl, AttentionPasses, DeviceChoice};
use candlewick_parallel::Groups;
use candlewick_text::hub::{Hub, HubError, ModelAndAdapter, ModelFiles};
use clap::{Args, ValueEnum};

use crate::lm::Lm;
use crate::parts::Parts;
use crate::ranks::Ranks;
use candlewick_runtime::exit::ExitCode;

/// A model, and the options of its computation.
#[derive(Debug, Args)]
pub struct Model {
    /// A Hugging Face folder, a Hub id, an adapter folder, or a run's output folder: its best export, or else its newest
    #[arg(long, short = 'M')]
    pub model: String,
    /// The options of its computation.
    #[command(flatten)]
    pub compute: Compute,
}

/// The options of a model's computation.
#[derive(Debug, Args)]
pub struct Compute {
    /// The branch, tag or commit of a Hub id
    #[arg(long)]
    pub revision: Option<String>,
    /// A PEFT adapter on top of the model: its folder, a Hub id, or the output folder of a run that trained one
    #[arg(long)]
    pub adapter: Option<String>,
    /// The device: auto (the first GPU, if there is one), cpu, cuda or cuda:N
    #[arg(long, default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// The dtype to compute in; auto is that of the model
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    pub dtype: Dtype,
    /// The implementation of attention
    #[arg(long, value_enum, default_value_t = Attention::Auto)]
    attn_implementation: Attention,
}

/// The dtype of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// 32 bits
    #[value(alias = "float32")]
    F32,
    /// 16 bits with the exponents of f32
    #[value(alias = "bfloat16")]
    Bf16,
    /// 16 bits of IEEE 754
    #[value(alias = "float16")]
    F16,
    /// The one that the model's config names, or else that of its weights
    Auto,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Attention {
    /// cuDNN on a GPU where it is there and takes the case, else fused
    #[value(aliases = ["sdpa", "flash_attention_2", "flash_attention_3"])]
    Auto,
    /// cuDNN, in 16 bits
    Cudnn,
    /// Our kernels
    Fused,
    /// Plain tensor operations with all scores in memory
    #[value(alias = "eager")]
    Reference,
    /// FlashAttention 2 on a GPU, in 16 bits, if the program was built with the feature flash-attn
    Flash,
}

impl Model {
    /// Loads the model on this process alone.
    pub fn load(&self, hub: &Hub) -> Result<Lm> {
        self.compute.load(&self.model, hub)
    }

    /// Loads the model on each rank, or its part of it, after one of them has downloaded it.
    pub fn load_on(&self, hub: &Hub, ranks: &Ranks, device: Device) -> Result<Lm> {
        let folders = ranks.process.one_rank_per_node_first(|| self.compute.find(&self.model, hub))?;
        if ranks.process.is_first() {
            folders.notes.iter().for_each(|note| eprintln!("{note}"));
        }
        ranks
            .process
            .all_ok(Config::read(&folders.model).map_err(Into::into).and_then(|config| ranks.parts.check(&config)))?;
        let load = || self.compute.load_from(&folders, device, (ranks.parts, &ranks.groups));
        // Ranks that have a model together make groups of their own while they load it, and wait for each other.
        ranks.process.all_ok(if ranks.parts.is_whole() { ranks.process.keep_alive().during(load) } else { load() })
    }
}

impl Compute {
    /// Loads the model `name` on this process alone.
    pub fn load(&self, name: &str, hub: &Hub) -> Result<Lm> {
        let device = self.device.open().map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))?;
        let folders = self.find(name, hub)?;
        folders.notes.iter().for_each(|note| eprintln!("{note}"));
        self.load_from(&folders, device, (Parts::WHOLE, &Parts::alone()?))
    }

    /// Finds the folders of the model and of the adapter on top of it, downloading what is not here.
    fn find(&self, name: &str, hub: &Hub) -> Result<ModelAndAdapter> {
        let revision = self.revision.as_deref();
        let Some(adapter) = &self.adapter else {
            return hub.model_and_adapter(name, revision).map_err(not_found);
        };
        let (adapter, note) = hub.adapter(adapter).map_err(not_found)?;
        let found = hub.find_model(name, revision, ModelFiles::All).map_err(not_found)?;
        if found.is_adapter() {
            let error = anyhow!(
                "failed to load the model {}: it is an adapter, and --adapter names another; give the base model as --model",
                found.folder.display()
            );
            bail!(error.context(ExitCode::Usage));
        }
        let notes = found.note("model").into_iter().chain(note).collect();
        Ok(ModelAndAdapter { model: found.folder, adapter: Some(adapter), notes })
    }

    fn load_from(&self, folders: &ModelAndAdapter, device: Device, parts: (Parts, &Groups)) -> Result<Lm> {
        let config = Config::read(&folders.model)?;
        let dtype = self.dtype.of(&config, &folders.model)?;
        let attention = self.attention();
        let said = attention.explain(&device, dtype, config.attention_heads(), AttentionPasses::Forward);
        said.map_err(|error| anyhow!("failed to start: {error}").context(ExitCode::Usage))?;
        let lm = Lm::load_in_parts(&folders.model, folders.adapter.as_deref(), dtype, device, parts)?;
        Ok(lm.with_attention(attention))
    }

    fn attention(&self) -> AttentionChoice {
        let implementation = match self.attn_implementation {
            Attention::Auto => AttentionImpl::Auto,
            Attention::Cudnn => AttentionImpl::Cudnn,
            Attention::Fused => AttentionImpl::Fused,
            Attention::Reference => AttentionImpl::Reference,
            Attention::Flash => AttentionImpl::Flash,
        };
        AttentionChoice { implementation, deterministic: false }
    }
}

fn not_found(error: HubError) -> anyhow::Error {
    anyhow!("failed to {error}").context(ExitCode::Data)
}

impl Dtype {
    /// Returns torch's name of a dtype that was named.
    pub fn in_torch(self) -> Option<&'static str> {
        match self {
            Self::F32 => Some("float32"),
            Self::Bf16 => Some("bfloat16"),
            Self::F16 => Some("float16"),
            Self::Auto => None,
        }
    }

    /// Returns the dtype that was named; none for `auto`.
    pub fn named(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::Bf16 => Some(DType::BF16),
            Self::F16 => Some(DType::F16),
            Self::Auto => None,
        }
    }

    fn of(self, config: &Config, folder: &Path) -> Result<DType> {
        if let Some(dtype) = self.named() {
            return Ok(dtype);
        }
        let named = config.to_json();
        let named = ["dtype", "torch_dtype"].iter().find_map(|key| named.get(*key)?.as_str().map(str::to_owned));
        match named.as_deref() {
            None => Ok(Checkpoint::open(folder)?.float_dtype().unwrap_or(DType::F32)),
            Some("float32") => Ok(DType::F32),
            Some("bfloat16") => Ok(DType::BF16),
            Some("float16") => Ok(DType::F16),
            Some(other) => {
                let error = anyhow!("failed to start: the config names {other}; choose a --dtype");
                Err(error.context(ExitCode::Usage))
            }
        }
    }
}
