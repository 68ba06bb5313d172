//! Loading of a model by command-line options.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use candle_core::{DType, Device};
use candlewick_model::Config;
use candlewick_model::checkpoint::Checkpoint;
use candlewick_ops::{AttentionChoice, AttentionImpl, AttentionPasses, DeviceChoice, require_batch_invariance};
use candlewick_parallel::ParallelGroups;
use candlewick_text::hub::{Hub, HubError, ModelAndAdapter, ModelFiles};
use candlewick_text::long_integer;
use candlewick_text::template::{ChatTemplateSource, check_variable};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value as Json};

use crate::lm::Lm;
use crate::parallel_config::ParallelConfig;
use crate::ranks::EvalRanks;
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::terminal::print_note;

/// Model and compute options.
#[derive(Debug, Args)]
pub struct ModelOptions {
    /// A Hugging Face folder, a Hub id, an adapter folder, or a run's output folder (its best export, else its newest)
    #[arg(long, short = 'M')]
    pub model: String,
    /// Compute options.
    #[command(flatten)]
    pub compute: ComputeOptions,
}

/// Compute options of a model.
#[derive(Clone, Debug, Args)]
pub struct ComputeOptions {
    /// The branch, tag or commit of a Hub id
    #[arg(long)]
    pub revision: Option<String>,
    /// A PEFT adapter on top of the model: its folder, a Hub id, or the output folder of a run that trained one
    #[arg(long)]
    pub adapter: Option<String>,
    /// Device: auto (the first GPU, if there is one), cpu, cuda or cuda:N
    #[arg(long, default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Compute dtype; auto is the model's
    #[arg(long, value_enum, default_value_t = DtypeOption::Auto)]
    pub dtype: DtypeOption,
    /// Attention implementation
    #[arg(long, value_enum, default_value_t = Attention::Auto)]
    attn_implementation: Attention,
    /// Quantization of the inputs and weights of linear layers and routed experts; none computes in the dtype
    #[arg(long, value_enum, default_value_t = QuantizationOption::None)]
    pub quantization: QuantizationOption,
    /// Independence of the results; batch_invariant costs speed
    #[arg(long, value_enum, default_value_t = DeterministicOption::None)]
    deterministic: DeterministicOption,
}

/// Compute dtype option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DtypeOption {
    /// float32
    #[value(alias = "float32")]
    F32,
    /// bfloat16
    #[value(alias = "bfloat16")]
    Bf16,
    /// float16
    #[value(alias = "float16")]
    F16,
    /// The dtype in config.json, else that of the weights
    Auto,
}

/// Quantization option of linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QuantizationOption {
    /// No quantization
    None,
    /// FP8 (E4M3) with the fixed scales in the export of a run with `precision.recipe: delayed`
    Fp8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DeterministicOption {
    /// Results depend on the request and, by rounding, on the requests that are computed with it
    None,
    /// Results depend on the request alone: kernels do not depend on the number of rows
    #[value(name = "batch_invariant", alias = "batch-invariant")]
    BatchInvariant,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Attention {
    /// cuDNN on a GPU if it is available and supports the shape, else fused
    #[value(aliases = ["sdpa", "flash_attention_2", "flash_attention_3"])]
    Auto,
    /// cuDNN, for bf16 and f16
    Cudnn,
    /// Candlewick's fused kernels
    Fused,
    /// Tensor operations that materialize all attention scores
    #[value(alias = "eager")]
    Reference,
    /// FlashAttention 2 on a GPU, for bf16 and f16; needs a build with the feature flash-attn
    Flash,
}

impl QuantizationOption {
    /// Returns the option's value; `None` without quantization.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Fp8 => Some("fp8"),
        }
    }
}

/// Options of the chat template.
#[derive(Clone, Debug, Args)]
pub struct TemplateOptions {
    /// Chat template in place of the model's: a built-in one (chatml, qwen2.5, qwen3, llama3, mistral, gemma, llama2,
    /// zephyr, vicuna, alpaca), or the path of a Jinja file
    #[arg(long, value_name = "NAME|FILE", value_parser = ChatTemplateSource::parse)]
    chat_template: Option<ChatTemplateSource>,
    /// Variables of the chat template, as JSON: '{"enable_thinking": false}'
    #[arg(long, value_name = "JSON", value_parser = parse_variables)]
    chat_template_kwargs: Option<TemplateVariables>,
}

#[derive(Clone, Debug)]
struct TemplateVariables(Map<String, Json>);

fn parse_variables(text: &str) -> Result<TemplateVariables, String> {
    let expected = |error| format!("expected a JSON object such as {{\"a\": 1}}: {error}");
    let variables: Map<String, Json> = long_integer::parse(text).and_then(serde_json::from_value).map_err(expected)?;
    variables.keys().try_for_each(|name| check_variable(name))?;
    Ok(TemplateVariables(variables))
}

impl TemplateOptions {
    /// Sets the model's chat template and its variables.
    pub fn apply(&self, lm: Lm) -> Result<Lm> {
        let lm = match &self.chat_template {
            Some(source) => lm.with_chat_template(source).map_err(|error| error.context(ExitCode::Usage))?,
            None => lm,
        };
        match &self.chat_template_kwargs {
            Some(TemplateVariables(variables)) => lm.with_template_variables(variables),
            None => Ok(lm),
        }
    }
}

impl ModelOptions {
    /// Loads the model in this process.
    pub fn load(&self, hub: &Hub) -> Result<Lm> {
        self.compute.load(&self.model, hub)
    }

    /// Loads the model, or this rank's shard, on each rank; one rank downloads it first.
    pub fn load_on(&self, hub: &Hub, ranks: &EvalRanks, device: Device) -> Result<Lm> {
        self.compute.load_on(&self.model, hub, ranks, device)
    }
}

impl ComputeOptions {
    /// Loads the model `name` in this process.
    pub fn load(&self, name: &str, hub: &Hub) -> Result<Lm> {
        let device = self.device.open().map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))?;
        let folders = self.find(name, hub)?;
        folders.notes.iter().for_each(|note| print_note(note));
        self.load_from(&folders, device, (ParallelConfig::SINGLE_RANK, &ParallelConfig::single_rank_groups()?))
    }

    /// Loads the model `name`, or this rank's shard, on each rank; one rank downloads it first. Collective: all ranks of
    /// `ranks` must call it.
    pub fn load_on(&self, name: &str, hub: &Hub, ranks: &EvalRanks, device: Device) -> Result<Lm> {
        self.load_folders_on(&self.find_on(name, hub, ranks)?, ranks, device)
    }

    /// Finds the folders of model and adapter on each rank; one rank downloads missing ones first. Collective.
    pub(super) fn find_on(&self, name: &str, hub: &Hub, ranks: &EvalRanks) -> Result<ModelAndAdapter> {
        let process = &ranks.process;
        let folders = process.one_rank_per_node_first(|| self.find(name, hub))?;
        if process.is_first() {
            folders.notes.iter().for_each(|note| print_note(note));
        }
        Ok(folders)
    }

    /// Loads the model of these folders, or this rank's shard, on each rank. Collective.
    pub(super) fn load_folders_on(&self, folders: &ModelAndAdapter, ranks: &EvalRanks, device: Device) -> Result<Lm> {
        let EvalRanks { process, parallel_config, groups } = ranks;
        let config = Config::read(&folders.model).map_err(Into::into);
        process.all_ok(config.and_then(|config| parallel_config.check_can_split(&config)))?;
        let load = || self.load_from(folders, device, (*parallel_config, groups));
        // Ranks of a sharded model create process groups while loading, and wait for each other.
        process.all_ok(match parallel_config.is_single_rank() {
            true => process.keep_alive().during(load),
            false => load(),
        })
    }

    /// Finds the folders of model and adapter, and downloads missing ones.
    fn find(&self, name: &str, hub: &Hub) -> Result<ModelAndAdapter> {
        find_folders(name, self.revision.as_deref(), self.adapter.as_deref(), hub)
    }

    fn load_from(
        &self,
        folders: &ModelAndAdapter,
        device: Device,
        parallel_config: (ParallelConfig, &ParallelGroups),
    ) -> Result<Lm> {
        if self.deterministic == DeterministicOption::BatchInvariant {
            self.check_batch_invariance(&device, parallel_config.0)?;
        }
        let config = Config::read(&folders.model)?;
        let dtype = self.dtype.of(&config, &folders.model)?;
        let attention = self.attention();
        let said =
            attention.explain(&device, dtype, config.attention(config.max_positions()), AttentionPasses::Forward);
        said.map_err(|error| anyhow!("failed to start: {error}").context(ExitCode::Usage))?;
        let lm = Lm::load_sharded(&folders.model, folders.adapter.as_deref(), dtype, device, parallel_config)?;
        let lm = lm.with_attention(attention);
        match self.quantization {
            QuantizationOption::None => Ok(lm),
            QuantizationOption::Fp8 => lm.with_fp8_scales(),
        }
    }

    /// Selects batch-invariant kernels. Refuses settings whose result for a row depends on the other rows.
    fn check_batch_invariance(&self, device: &Device, parallel_config: ParallelConfig) -> Result<()> {
        let refused = |problem: String| anyhow!("failed to start: {problem}").context(ExitCode::Usage);
        if let (Attention::Cudnn | Attention::Flash, Some(name)) =
            (self.attn_implementation, self.attn_implementation.to_possible_value())
        {
            return Err(refused(format!(
                "--attn-implementation {} contradicts --deterministic batch_invariant: its plan depends on the batch; use \
                 auto or fused",
                name.get_name()
            )));
        }
        let size = parallel_config.tensor_parallel;
        // A sum of two commutes, and host backends sum in the order of the ranks.
        if size > 2 && !device.is_cpu() {
            return Err(refused(format!(
                "--tensor-parallel-size {size} contradicts --deterministic batch_invariant: the order in which NCCL sums \
                 more than 2 ranks depends on the number of rows; use 1 or 2"
            )));
        }
        require_batch_invariance(device).map_err(|error| refused(error.to_string()))
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

/// Finds the folders of the model `name` and of the adapter, if one is given. Downloads missing ones.
pub fn find_folders(name: &str, revision: Option<&str>, adapter: Option<&str>, hub: &Hub) -> Result<ModelAndAdapter> {
    let Some(adapter) = adapter else {
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

pub(super) fn not_found(error: HubError) -> anyhow::Error {
    anyhow!("failed to {error}").context(ExitCode::Data)
}

impl DtypeOption {
    /// Returns torch's name of the chosen dtype; `None` for `auto`.
    pub fn torch_name(self) -> Option<&'static str> {
        match self {
            Self::F32 => Some("float32"),
            Self::Bf16 => Some("bfloat16"),
            Self::F16 => Some("float16"),
            Self::Auto => None,
        }
    }

    /// Returns the chosen dtype; `None` for `auto`.
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
            None => Ok(Checkpoint::of_model(folder, config)?.float_dtype().unwrap_or(DType::F32)),
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
