//! The resolution of a recipe: every check, every default and every derived number, made once.
//!
//! [`Plan::resolve`] is pure: it uses no device and no network. [`Environment`] has the facts from outside of the recipe:
//! the model's config, the number of cores. No code below the plan validates a setting or supplies a default.

mod autocast;
mod backend;
mod batch_invariance;
mod batches;
mod checkpoints;
mod deepspeed;
mod dialect;
mod environment;
mod eval;
mod intervals;
mod lock_file;
mod masking;
mod memory;
mod micro_batch;
mod mixture;
mod model;
mod moe;
mod optimizer;
mod optimizer_groups;
mod output;
mod pipeline;
mod precision;
mod profiling;
mod ranks;
mod refused;
mod resolver;
mod router;
mod snowflake;
mod sources;
mod streaming;
mod temp_dir;
mod tokenize_kwargs;
mod tracking;
mod tracking_env;
mod watchdog;

use candlewick_ops::DeviceChoice;

use crate::plan::{MicroBatchChoice, ObjectivePlan, Plan, ResolvedSetting};
use crate::recipe::{
    DeterministicMode, Loaded, MemoryMode, MicroBatchSize, OnNonfinite, RecipeError, missing_feature_advice,
};

pub(crate) use environment::is_path;
pub use environment::{
    BuildFeatures, Environment, EnvironmentError, HubAccess, HubView, Machines, RecipeLock, WorldInfo,
};
pub(crate) use output::conversation;
pub use temp_dir::TempDir;
pub use tracking_env::TrackingEnv;

use resolver::Resolver;

impl Plan {
    /// Resolves a recipe. Fails with all faults of the recipe at once.
    pub fn resolve(loaded: &Loaded, env: &Environment) -> Result<Self, RecipeError> {
        let mut resolver = Resolver::new(loaded, env);
        refused::refuse_unsupported_keys(&mut resolver);
        deepspeed::check_section(&mut resolver);
        let kind = batches::resolve_kind(&mut resolver);
        dialect::note_defaults(&mut resolver, kind);
        let model = model::resolve(&mut resolver);
        let tokenizer = model::resolve_tokenizer(&mut resolver);
        let pipeline = pipeline::resolve(&mut resolver, model.config.as_ref());
        let ranks = ranks::resolve(&mut resolver, &model, pipeline.stages);
        let moe = moe::resolve(&mut resolver, &model, &ranks);
        let fp8 = precision::resolve(&mut resolver, &model, &ranks);
        let data = batches::resolve(&mut resolver, kind, ranks.n_data(), &model, &tokenizer);
        lock_file::check(&mut resolver, &model, &tokenizer, &data);
        pipeline::note_bubble(&mut resolver, &pipeline, data.gradient_accumulation_steps);
        let label_smoothing_factor = optimizer::label_smoothing_factor(&mut resolver);
        let optimizer = optimizer::resolve(&mut resolver, &model);
        optimizer_groups::check_groups(&mut resolver, &model, &optimizer);
        optimizer::note_default_rate(&mut resolver, &model);
        let optimizer_on_host = deepspeed::optimizer_on_host(&mut resolver);
        let weights_on_host = deepspeed::weights_on_host(&mut resolver);
        let schedule = optimizer::resolve_schedule(&mut resolver);
        optimizer::check_known_horizon(&mut resolver, &data, &optimizer, &schedule);
        let eval_interval = eval::resolve_interval(&mut resolver);
        let eval = eval::resolve_eval_loss(&mut resolver, &data, &eval_interval);
        let tasks = eval::resolve_tasks(&mut resolver, eval_interval);
        let early_stopping = eval::resolve_early_stopping(&mut resolver, eval.as_ref(), tasks.as_ref());
        let best = eval::resolve_best(&mut resolver, eval.as_ref(), tasks.as_ref(), early_stopping.as_ref());
        let exit = output::resolve_exit(&mut resolver);
        let checkpoints = checkpoints::resolve(&mut resolver);
        let stop_checkpoint = checkpoints::resolve_stop(&mut resolver, &checkpoints);
        let resume_from_checkpoint = checkpoints::resolve_resume(&mut resolver);
        let loss_watchdog = watchdog::resolve(&mut resolver, &checkpoints);
        let log = output::resolve_log(&mut resolver);
        let profiling = profiling::resolve(&mut resolver);
        let logger = output::resolve_logger(&mut resolver);
        let generate = output::resolve_generate(&mut resolver, (eval.as_ref(), tasks.as_ref()));
        let recipe = &loaded.recipe;
        if let Some(base) = &recipe.base {
            resolver.record("base", base, loaded.origin(&["base"]));
        }
        let seed = resolver.count("seed", recipe.seed, 42) as u64;
        let device = device(&mut resolver);
        let on_nonfinite = resolver.pick("on_nonfinite", recipe.on_nonfinite, OnNonfinite::Stop);
        let deterministic = resolver.pick("deterministic", recipe.deterministic, DeterministicMode::None);
        batch_invariance::check(&mut resolver, deterministic, (&model, &ranks, device));
        let memory = resolver.pick("memory", recipe.memory, MemoryMode::Manual);
        let (settings, notes) = resolver.finish()?;
        let written = summarized_keys(loaded, &settings);
        let plan = Self {
            recipe: loaded.source().path.clone(),
            seed,
            device,
            ranks,
            pipeline,
            memory,
            micro_batch: match recipe.micro_batch_size {
                Some(MicroBatchSize::Auto) => MicroBatchChoice::FreeMemory,
                _ => MicroBatchChoice::Recipe,
            },
            model,
            moe,
            fp8,
            tokenizer,
            data,
            objective: ObjectivePlan::of(kind),
            label_smoothing_factor,
            optimizer,
            optimizer_on_host,
            weights_on_host,
            schedule,
            eval,
            tasks,
            best,
            early_stopping,
            exit,
            checkpoints,
            stop_checkpoint,
            resume_from_checkpoint,
            log,
            profiling,
            on_nonfinite,
            deterministic,
            loss_watchdog,
            generate,
            logger,
            settings,
            written,
            notes,
            merged_recipe: loaded.merged(),
        };
        let plan = match memory {
            MemoryMode::Manual => plan,
            MemoryMode::Auto => memory::resolve(plan, loaded, env)?,
        };
        Ok(micro_batch::resolve(plan, env))
    }
}

/// Returns the keys that the recipe sets and no setting has, as written.
fn summarized_keys(loaded: &Loaded, settings: &[ResolvedSetting]) -> Vec<ResolvedSetting> {
    let written = loaded.written_keys().into_iter().map(|(key, value, origin)| ResolvedSetting { key, value, origin });
    let is_recorded = |written: &ResolvedSetting| {
        let parent = written.key.rsplit_once('.').map_or("", |(parent, _)| parent);
        let below = format!("{}.", written.key);
        settings.iter().any(|setting| {
            // A source's setting is its name.
            let is_name = setting.key == parent && setting.value == written.value;
            setting.key == written.key || is_name || setting.key.starts_with(&below)
        })
    };
    written.filter(|written| !is_recorded(written)).collect()
}

fn device(resolver: &mut Resolver) -> DeviceChoice {
    let name = resolver.pick("device", resolver.recipe().device.clone(), "auto".into());
    let device = name.parse().unwrap_or_else(|problem: String| {
        let message = format!("device: {problem}");
        match missing_feature_advice(name.split(':').next().unwrap_or(&name)) {
            Some(advice) => resolver.report_with_advice(&["device"], message, advice),
            None => resolver.report(&["device"], message),
        }
        DeviceChoice::Auto
    });
    let is_placed = resolver.env.world.machines != Machines::Unknown;
    if matches!(device, DeviceChoice::Cuda(_)) && is_placed && !resolver.env.features.nccl {
        resolver.note(format!(
            "device: {device}, but this program was built without CUDA; scripts/build-gpu builds one with it"
        ));
    }
    device
}
