//! This rank's process groups and the agreement of all ranks on plan and stop requests.

use std::path::Path;

use anyhow::{Context, Error, Result, anyhow};
use candle_core::{Device, Tensor};
use candlewick_comm::mesh::{Axis, Mesh};
use candlewick_comm::{Cause, RankFailure, Reduce, World};
use candlewick_ops::to_host;
use candlewick_parallel::ParallelGroups;
use candlewick_runtime::process_group::{ProcessGroup, fail};
use serde_json::{Value, json};

use super::rank_info::RankInfo;
use crate::data::ReaderShard;
use crate::exit::{ExitCode, classify};
use crate::plan::{CheckpointingMode, MicroBatchChoice, Plan, RanksPlan};
use crate::profiling::Instruments;
use crate::recipe::MemoryMode;
use crate::signals::{Signal, StopRequest};

/// The process groups of this rank.
pub(super) struct RankContext<'w> {
    world: &'w World,
    /// The group of all ranks, on the host.
    pub(super) process: ProcessGroup,
    /// The compute device of this rank.
    pub(super) device: Device,
    pub(super) groups: ParallelGroups,
    /// The position of this rank among the data-parallel ranks.
    pub(super) rank_info: RankInfo,
    /// The group of all ranks for asynchronous checkpoints.
    pub(super) background: ProcessGroup,
    /// The measurements of this process.
    pub(super) instruments: Instruments,
}

impl<'w> RankContext<'w> {
    /// Creates the groups of `plan` from the ranks of `world`. All ranks call this. `device` is the compute device of
    /// this rank.
    pub(super) fn new(world: &'w World, device: &Device, plan: &RanksPlan) -> Result<Self> {
        let device = device.clone();
        let mesh = Mesh::new(plan.degrees(), world.size()).map_err(|error| anyhow!("failed to start: {error}"))?;
        let groups = ParallelGroups::new(&mesh, &*world.group())?;
        let groups = match plan.expert {
            None => groups,
            Some(_) => groups.with_experts(&mesh, &*world.group())?,
        };
        let place = |axis| mesh.coordinate(world.rank(), axis);
        let data_rank = place(Axis::DpReplicate) * plan.dp_shard + place(Axis::DpShard);
        let background = world.group().split("saves", &[(0..world.size()).collect()])?;
        let process = ProcessGroup::new(world)?;
        let background = process.over(background);
        Ok(Self {
            world,
            process,
            device,
            groups,
            rank_info: RankInfo { data_rank, data_world: plan.n_data() },
            background,
            instruments: Instruments::default(),
        })
    }

    /// Uses these measurements.
    pub(super) fn with_instruments(self, instruments: &Instruments) -> Self {
        instruments.set_device(&self.device);
        Self { instruments: instruments.clone(), ..self }
    }

    /// Returns this rank among those that read a stream.
    pub(super) fn reader(&self) -> ReaderShard {
        ReaderShard { rank: self.process.rank(), n_ranks: self.world.size() }
    }

    /// Returns true on one of the ranks that share a micro-batch. That rank counts its tokens.
    pub(super) fn counts_tokens(&self) -> bool {
        let ParallelGroups { cp, sp, pp, .. } = &self.groups;
        [cp, sp, pp].iter().all(|group| group.rank() == 0)
    }

    /// Returns the stop request of any rank, on all ranks. A signal takes precedence over the kill switch. All ranks
    /// call this.
    pub(super) fn agree_on_stop(
        &self,
        own: Option<StopRequest>,
        kill_switch: Option<&Path>,
    ) -> Result<Option<StopRequest>> {
        const SIGNALS: [Signal; 4] = [Signal::Preempt, Signal::HangUp, Signal::Interrupt, Signal::Terminate];
        let code = match own {
            None => 0,
            Some(StopRequest::KillSwitch(_)) => 1,
            Some(StopRequest::Signal(signal)) => 2 + SIGNALS.iter().position(|it| *it == signal).unwrap_or(0) as u32,
        };
        let code = self.process.group().all_reduce(&Tensor::new(code, &Device::Cpu)?, Reduce::Max)?;
        Ok(match to_host(&code)?.to_scalar::<u32>()? {
            0 => None,
            1 => kill_switch.map(|path| StopRequest::KillSwitch(path.to_owned())),
            code => Some(StopRequest::Signal(SIGNALS[code as usize - 2])),
        })
    }

    /// Reports a failure to the other ranks. If another rank failed first, returns an error that names it.
    pub(super) fn report_failure(&self, error: Error) -> Error {
        fail(self.world, "train", (classify(&error), error), peer_failure)
    }

    /// Returns the plan that all ranks use. With `memory: auto`, all ranks use the checkpointing mode of the rank with
    /// the least free memory, because they compute each layer together. With `micro_batch_size: auto` they use its rows, too.
    /// Logs a choice that is not this rank's.
    ///
    /// Fails if the plans of the ranks differ. All ranks call this.
    pub(super) fn agree_on(&self, plan: &Plan) -> Result<Plan> {
        // Only ranks that all have `auto` exchange what it selected.
        self.check_equal(choices_of_all_ranks(plan))?;
        let mut plan = plan.clone();
        let mut changes = Vec::new();
        if plan.memory == MemoryMode::Auto {
            changes.extend(plan.use_modes_of_ranks(self.lowest_memory_mode(plan.model.activations)?));
        }
        if plan.micro_batch == MicroBatchChoice::FreeMemory {
            changes.extend(plan.use_micro_batch_of_ranks(self.smallest(plan.data.micro_batch_size)?));
        }
        for change in changes {
            tracing::info!("{change}");
        }
        self.check_equal(settings_of_all_ranks(&plan)?)?;
        Ok(plan)
    }

    fn lowest_memory_mode(&self, own: CheckpointingMode) -> Result<CheckpointingMode> {
        let all = self.process.exchange(Ok(serde_json::to_vec(&own)?))?;
        all.iter()
            .try_fold(own, |lowest_memory_mode, other| Ok(lowest_memory_mode.leaner(serde_json::from_slice(other)?)))
    }

    /// Returns the smallest count of any rank, on all ranks.
    fn smallest(&self, own: usize) -> Result<usize> {
        let all = self.process.exchange(Ok(serde_json::to_vec(&own)?))?;
        all.iter().try_fold(own, |smallest, other| Ok(smallest.min(serde_json::from_slice(other)?)))
    }

    /// Checks that all ranks have these settings. The error names the first key that differs.
    fn check_equal(&self, own: Value) -> Result<()> {
        let own = own.to_string().into_bytes();
        let all = self.process.exchange(Ok(own.clone()))?;
        let Some(rank) = all.iter().position(|other| *other != own) else { return Ok(()) };
        let found = difference("", &serde_json::from_slice(&own)?, &serde_json::from_slice(&all[rank])?);
        let (key, [ours, theirs]) = found.context("failed to compare two plans")?;
        let error = anyhow!(
            "failed to start: rank {rank} has another plan than rank {}: {key} is {theirs} there, and here {ours}; give all \
             ranks the same recipe and arguments",
            self.process.rank()
        );
        Err(error.context(ExitCode::Usage))
    }
}

/// Returns the keys of `auto` choices as the recipe has them, and the rows that a choice divides.
fn choices_of_all_ranks(plan: &Plan) -> Value {
    let data = &plan.data;
    let (micro_batch_size, accumulation) = match plan.micro_batch {
        MicroBatchChoice::FreeMemory => (json!("auto"), data.micro_batch_size * data.gradient_accumulation_steps),
        MicroBatchChoice::Recipe => (json!(data.micro_batch_size), data.gradient_accumulation_steps),
    };
    json!({
        "memory": plan.memory, "micro_batch_size": micro_batch_size, "gradient_accumulation_steps": accumulation,
    })
}

/// Returns the settings that must be equal on all ranks: without output, data workers and the offload folder of the
/// machine.
fn settings_of_all_ranks(plan: &Plan) -> Result<Value> {
    let mut shown = serde_json::to_value(plan)?;
    let own = [
        "log",
        "logger",
        "settings",
        "written",
        "notes",
        "data.num_proc",
        "model.activation_offload_dir",
        "model.offloads_to_ram",
    ];
    for key in own {
        let (of, key) = key.split_once('.').unwrap_or(("", key));
        let keys = if of.is_empty() { Some(&mut shown) } else { shown.get_mut(of) };
        let removed = keys.and_then(Value::as_object_mut).and_then(|keys| keys.remove(key));
        debug_assert!(removed.is_some(), "a plan has no {of}.{key}");
    }
    Ok(shown)
}

/// Returns the first key within `key` whose values differ, with both values.
fn difference(key: &str, a: &Value, b: &Value) -> Option<(String, [String; 2])> {
    match (a, b) {
        _ if a == b => None,
        (Value::Object(a), Value::Object(b)) if a.keys().eq(b.keys()) => {
            let within = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
            a.iter().zip(b.values()).find_map(|((name, a), b)| difference(&within(name), a, b))
        }
        _ => Some((key.to_owned(), [a.to_string(), b.to_string()])),
    }
}

/// Returns the error of a rank that ends because the group failed, with advice.
pub(super) fn peer_failure(failure: &RankFailure) -> Error {
    let rank = failure.rank;
    let advice = match failure.cause {
        Cause::Reported => format!("see the log of rank {rank}"),
        Cause::Exited => format!("see the last output of rank {rank} or of its launcher"),
        Cause::TimedOut => format!("if rank {rank} was only slow, raise ddp_timeout"),
        Cause::CallMismatch => "all ranks must run the same program, with the same recipe and data".to_owned(),
    };
    let error =
        anyhow!("failed to {failure}; {advice}. With auto_resume, a restarted run resumes from the newest checkpoint");
    error.context(ExitCode::Peer)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::estimate::{Capacity, DeviceKind};
    use crate::metrics::Console;
    use crate::plan::RanksPlan;
    use crate::recipe::Loaded;
    use crate::resolve::{Environment, WorldInfo};
    use candlewick_comm::{Options, threads};
    use candlewick_model::Config;

    /// Returns the results of three ranks.
    fn of_three<T: Send>(rank: impl Fn(&RankContext) -> Result<T> + Sync) -> Vec<T> {
        let plan = RanksPlan { dp_replicate: 3, ..RanksPlan::alone() };
        let run = |world: &World| rank(&RankContext::new(world, &Device::Cpu, &plan)?);
        threads::run(3, Options::default(), run).unwrap()
    }

    #[test]
    fn all_ranks_use_the_mode_of_the_rank_with_the_least_memory() {
        use CheckpointingMode::{EveryKth, Full, None, Offload, Selective};
        for (own, want) in [
            ([None, EveryKth(3), EveryKth(2)], EveryKth(2)),
            ([Full, Offload(0.25), None], Offload(0.25)),
            ([Selective, EveryKth(2), None], Selective),
            ([Selective, Full, None], Full),
            ([None; 3], None),
        ] {
            assert_eq!(of_three(|ranks| ranks.lowest_memory_mode(own[ranks.process.rank()])), [want; 3]);
        }
    }

    /// Returns the plan of a recipe with these arguments, on a machine with much free memory.
    fn resolved(arguments: &[&str]) -> Plan {
        let text = "model: {name_or_path: org/model}\ndata: {sources: [a.jsonl], max_length: 1024}\n\
                    gradient_accumulation_steps: 24\n";
        let arguments: Vec<String> = arguments.iter().map(|it| (*it).to_owned()).collect();
        let loaded = Loaded::parse(Path::new("r.yaml"), text.to_owned(), &arguments).unwrap();
        let config = json!({
            "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        });
        let config = Some(Config::from_json(config).unwrap());
        let env = Environment::with_config(config, &loaded, Console::Full, WorldInfo::ALONE);
        let capacity = Some(Capacity::of(DeviceKind::Gpu, Some(1 << 50), "a test".into()));
        Plan::resolve(&loaded, &Environment { capacity, ..env }).unwrap()
    }

    #[test]
    fn settings_and_notes_have_the_choices_that_ranks_agreed_on() {
        let auto = resolved(&["micro_batch_size=auto", "memory=auto"]);
        assert_eq!((auto.data.micro_batch_size, auto.model.activations), (8, CheckpointingMode::None));
        let plans = of_three(|ranks| {
            let mut plan = auto.clone();
            if ranks.process.rank() == 2 {
                plan.use_micro_batch_of_ranks(4);
                plan.use_modes_of_ranks(CheckpointingMode::Full);
            }
            ranks.agree_on(&plan)
        });
        for plan in plans {
            assert_eq!((plan.data.micro_batch_size, plan.data.gradient_accumulation_steps), (4, 6));
            let setting = |key: &str| plan.settings.iter().find(|it| it.key == key).unwrap().value.clone();
            let keys = ["micro_batch_size", "gradient_accumulation_steps", "model.activation_checkpoint"];
            assert_eq!(keys.map(setting), [json!(4), json!(6), json!("full")]);
            let notes: Vec<_> = plan.notes.iter().filter(|note| note.contains("auto selects")).collect();
            assert!(notes.len() == 2 && notes.iter().all(|note| note.contains("of the rank with")), "{notes:?}");
        }
    }

    #[test]
    fn auto_on_some_ranks_only_is_named_by_its_key() {
        for (ours, theirs, want) in [
            ("micro_batch_size=auto", "micro_batch_size=4", "micro_batch_size is 4 there, and here \"auto\""),
            ("memory=auto", "memory=manual", "memory is \"manual\" there, and here \"auto\""),
        ] {
            let [ours, theirs] = [ours, theirs].map(|argument| resolved(&[argument]));
            let errors = of_three(|ranks| {
                let own = if ranks.process.rank() == 1 { &theirs } else { &ours };
                Ok(format!("{:#}", ranks.agree_on(own).unwrap_err()))
            });
            assert!(errors[0].contains(want), "{errors:?}");
        }
    }

    #[test]
    fn a_difference_of_plans_is_named_by_its_key() {
        let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        let [a, b] =
            [r#"{"seed": 1, "model": {"dtype": "f32"}}"#, r#"{"seed": 1, "model": {"dtype": "bf16"}}"#].map(json);
        let values = ["\"f32\"", "\"bf16\""].map(str::to_owned);
        assert_eq!(difference("", &a, &b), Some(("model.dtype".to_owned(), values)));
        assert_eq!(difference("", &a, &a), None);
        let (key, _) = difference("", &json(r#"{"eval": null}"#), &json(r#"{"eval": {"every": 5}}"#)).unwrap();
        assert_eq!(key, "eval");
    }

    #[test]
    fn a_stop_request_on_one_rank_reaches_all_ranks() {
        let switch = Path::new("/tmp/stop");
        let agreed = of_three(|ranks| {
            let own = (ranks.process.rank() == 1).then_some(StopRequest::Signal(Signal::Terminate));
            let other = (ranks.process.rank() == 2).then(|| StopRequest::KillSwitch(switch.to_owned()));
            let nothing = ranks.agree_on_stop(None, Some(switch))?;
            let switched = ranks.agree_on_stop(other.clone(), Some(switch))?;
            Ok([nothing, switched, ranks.agree_on_stop(own.or(other), Some(switch))?])
        });
        let (signal, file) = (StopRequest::Signal(Signal::Terminate), StopRequest::KillSwitch(switch.to_owned()));
        assert!(agreed.iter().all(|agreed| *agreed == [None, Some(file.clone()), Some(signal.clone())]), "{agreed:?}");
    }
}
