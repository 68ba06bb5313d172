//! This process among those that train together.

use std::path::Path;

use anyhow::{Context, Error, Result, anyhow};
use candle_core::{Device, Tensor};
use candlewick_comm::mesh::{Axis, Mesh};
use candlewick_comm::{Cause, RankFailure, Reduce, World};
use candlewick_ops::to_host;
use candlewick_parallel::ParallelGroups;
use candlewick_runtime::process_group::{ProcessGroup, fail};
use serde_json::Value;

use crate::exit::{ExitCode, classify};
use crate::plan::{Activations, Plan, RanksPlan};
use crate::recipe::MemoryModes;
use crate::signals::{Signal, Stop};

/// This rank and its groups.
pub(super) struct Ranks<'w> {
    world: &'w World,
    /// All ranks, on the host.
    pub(super) process: ProcessGroup,
    /// What this one computes on.
    pub(super) device: Device,
    pub(super) groups: ParallelGroups,
    /// This rank's place among those that compute different micro-batches, and how many places there are.
    pub(super) seat: (usize, usize),
    /// All ranks, for checkpoints that are written in the background.
    pub(super) background: ProcessGroup,
}

impl<'w> Ranks<'w> {
    /// Makes the groups that `plan` wants of the ranks of `world`, which all call it. `device` is what this one computes on.
    pub(super) fn new(world: &'w World, device: &Device, plan: &RanksPlan) -> Result<Self> {
        let device = device.clone();
        let mesh = Mesh::new(plan.degrees(), world.size()).map_err(|error| anyhow!("failed to start: {error}"))?;
        let groups = ParallelGroups::new(&mesh, &*world.group())?;
        let place = |axis| mesh.coordinate(world.rank(), axis);
        let seat = place(Axis::DpReplicate) * plan.dp_shard + place(Axis::DpShard);
        let background = world.group().split("saves", &[(0..world.size()).collect()])?;
        let process = ProcessGroup::new(world)?;
        let background = process.over(background);
        Ok(Self { world, process, device, groups, seat: (seat, plan.n_data()), background })
    }

    /// Tells whether this is the one rank, of those that share a micro-batch, that counts its tokens.
    pub(super) fn counts(&self) -> bool {
        let ParallelGroups { cp, sp, pp, .. } = &self.groups;
        [cp, sp, pp].iter().all(|group| group.rank() == 0)
    }

    /// Whether any rank was asked to stop, and how: a signal counts more than the kill switch. All ranks call it.
    pub(super) fn agree(&self, own: Option<Stop>, kill_switch: Option<&Path>) -> Result<Option<Stop>> {
        const SIGNALS: [Signal; 3] = [Signal::Preempt, Signal::Interrupt, Signal::Terminate];
        let code = match own {
            None => 0,
            Some(Stop::KillSwitch(_)) => 1,
            Some(Stop::Signal(signal)) => 2 + SIGNALS.iter().position(|it| *it == signal).unwrap_or(0) as u32,
        };
        let code = self.process.group().all_reduce(&Tensor::new(code, &Device::Cpu)?, Reduce::Max)?;
        Ok(match to_host(&code)?.to_scalar::<u32>()? {
            0 => None,
            1 => kill_switch.map(|path| Stop::KillSwitch(path.to_owned())),
            code => Some(Stop::Signal(SIGNALS[code as usize - 2])),
        })
    }

    /// Tells the other ranks why this one ends; if it ends because another did, says so instead.
    pub(super) fn blame(&self, error: Error) -> Error {
        fail(self.world, "train", (classify(&error), error), ended_by)
    }

    /// Returns the plan of all ranks: what they chose by the memory that each found free is what the one with least of it can
    /// afford, since blocks are computed together. Fails if the ranks were not started for one run. All ranks call it.
    pub(super) fn agree_on(&self, plan: &Plan) -> Result<Plan> {
        let mut plan = plan.clone();
        if plan.memory == MemoryModes::Auto {
            plan.model.activations = self.leanest(plan.model.activations)?;
        }
        self.check_same(&plan)?;
        Ok(plan)
    }

    fn leanest(&self, own: Activations) -> Result<Activations> {
        let all = self.process.exchange(Ok(serde_json::to_vec(&own)?))?;
        all.iter().try_fold(own, |leanest, other| Ok(leanest.leaner(serde_json::from_slice(other)?)))
    }

    fn check_same(&self, plan: &Plan) -> Result<()> {
        let own = in_common(plan)?.to_string().into_bytes();
        let all = self.process.exchange(Ok(own.clone()))?;
        let Some(rank) = all.iter().position(|other| *other != own) else { return Ok(()) };
        let found = difference("", &serde_json::from_slice(&own)?, &serde_json::from_slice(&all[rank])?);
        let (key, [ours, theirs]) = found.context("failed to tell two plans apart")?;
        let error = anyhow!(
            "failed to start: rank {rank} has another plan than rank {}: {key} is {theirs} there, and here {ours}; give all \
             ranks the same recipe and arguments",
            self.process.rank()
        );
        Err(error.context(ExitCode::Usage))
    }
}

/// What of a plan must be the same on all ranks: what a rank prints and logs is its own, and so is what it reads data with and
/// where its machine has room.
fn in_common(plan: &Plan) -> Result<Value> {
    let mut shown = serde_json::to_value(plan)?;
    let own = [
        "log",
        "logger",
        "settings",
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

/// The first key, within `key`, whose values differ.
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

/// The error of a rank that ends because the world has, and what can be done about it.
pub(super) fn ended_by(failure: &RankFailure) -> Error {
    let rank = failure.rank;
    let advice = match failure.cause {
        Cause::Reported => format!("rank {rank} has written more"),
        Cause::Exited => format!("the last output of rank {rank}, or of its launcher, says why"),
        Cause::TimedOut => format!("if rank {rank} was only slow, raise ddp_timeout"),
        Cause::CallMismatch => "all ranks must be the same program, with the same recipe and data".to_owned(),
    };
    let error =
        anyhow!("failed to {failure}; {advice}. Started again, a run with auto_resume goes on from the newest save");
    error.context(ExitCode::Peer)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::plan::RanksPlan;
    use candlewick_comm::{Options, threads};

    /// What each of three ranks returns.
    fn of_three<T: Send>(rank: impl Fn(&Ranks) -> Result<T> + Sync) -> Vec<T> {
        let plan = RanksPlan { dp_replicate: 3, ..RanksPlan::alone() };
        let run = |world: &World| rank(&Ranks::new(world, &Device::Cpu, &plan)?);
        threads::run(3, Options::default(), run).unwrap()
    }

    #[test]
    fn all_ranks_keep_as_little_as_the_one_that_can_keep_least() {
        use Activations::{Keep, Offload, Recompute, RecomputeEvery, Selective};
        for (own, want) in [
            ([Keep, RecomputeEvery(3), RecomputeEvery(2)], RecomputeEvery(2)),
            ([Recompute, Offload(0.25), Keep], Offload(0.25)),
            ([Selective, RecomputeEvery(2), Keep], Selective),
            ([Selective, Recompute, Keep], Recompute),
            ([Keep; 3], Keep),
        ] {
            assert_eq!(of_three(|ranks| ranks.leanest(own[ranks.process.rank()])), [want; 3]);
        }
    }

    #[test]
    fn what_differs_is_named_by_its_key() {
        let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        let [a, b] =
            [r#"{"seed": 1, "model": {"dtype": "f32"}}"#, r#"{"seed": 1, "model": {"dtype": "bf16"}}"#].map(json);
        let said = ["\"f32\"", "\"bf16\""].map(str::to_owned);
        assert_eq!(difference("", &a, &b), Some(("model.dtype".to_owned(), said)));
        assert_eq!(difference("", &a, &a), None);
        let (key, _) = difference("", &json(r#"{"eval": null}"#), &json(r#"{"eval": {"every": 5}}"#)).unwrap();
        assert_eq!(key, "eval");
    }

    #[test]
    fn a_stop_that_one_rank_hears_of_stops_all_at_one_step() {
        let switch = Path::new("/tmp/stop");
        let heard = of_three(|ranks| {
            let own = (ranks.process.rank() == 1).then_some(Stop::Signal(Signal::Terminate));
            let other = (ranks.process.rank() == 2).then(|| Stop::KillSwitch(switch.to_owned()));
            let nothing = ranks.agree(None, Some(switch))?;
            let switched = ranks.agree(other.clone(), Some(switch))?;
            Ok([nothing, switched, ranks.agree(own.or(other), Some(switch))?])
        });
        let (signal, file) = (Stop::Signal(Signal::Terminate), Stop::KillSwitch(switch.to_owned()));
        assert!(heard.iter().all(|heard| *heard == [None, Some(file.clone()), Some(signal.clone())]), "{heard:?}");
    }
}
