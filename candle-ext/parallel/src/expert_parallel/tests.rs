//! Tests of the overlap of exchanges with a shared expert.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::Mutex;

use candle_core::{DType, Device};
use candlewick_comm::{Options, Pending, Recv, Result as CommResult, threads};
use candlewick_model::{
    Config, ForwardContext, Model, ParallelOps, ParamGroupKind, ParamSpec, RouterContext, RouterSettings, UnitWeights,
};
use candlewick_ops::{self as ops, CuSeqlens, Tape, record};
use serde_json::json;

use super::all_gather::GatherSizes;
use super::row_counts::RowCounts;
use super::*;

/// Virtual time of a message, and of half of an MLP or of attention.
const MESSAGE: u64 = 50;
const HALF: u64 = 30;

/// Events of a rank, and its virtual time. Real time would depend on the load of the machine.
#[derive(Default)]
struct Timeline {
    events: Vec<&'static str>,
    now: u64,
    /// Arrival of the last message. The link of a rank carries one message at a time.
    link_is_free: u64,
}

type Events = Arc<Mutex<Timeline>>;

impl Timeline {
    fn push(&mut self, event: &'static str) {
        self.events.push(event);
    }

    /// Sends a message. Returns its arrival.
    fn send(&mut self) -> u64 {
        self.link_is_free = self.link_is_free.max(self.now) + MESSAGE;
        self.link_is_free
    }
}

/// Computation of a rank while its messages travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overlap {
    Allowed,
    /// The rank waits for each message when it sends it.
    Prevented,
}

/// A group that notes the start and the end of its exchanges, which take virtual time.
struct NotesEvents {
    group: Arc<dyn Collective>,
    events: Events,
    overlap: Overlap,
}

impl NotesEvents {
    /// Notes a start, and later the end of the wait.
    fn noted(&self, pending: Pending) -> Pending {
        let mut timeline = self.events.lock().unwrap();
        timeline.push("start");
        let arrival = timeline.send();
        if self.overlap == Overlap::Prevented {
            timeline.now = arrival;
        }
        let events = Arc::clone(&self.events);
        pending.then(move |y| {
            let mut timeline = events.lock().unwrap();
            timeline.push("wait");
            timeline.now = timeline.now.max(arrival);
            Ok(y)
        })
    }
}

impl Collective for NotesEvents {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn check_device(&self, device: &Device) -> CommResult<()> {
        self.group.check_device(device)
    }

    fn start_all_reduce(&self, x: &Tensor, op: Reduce) -> CommResult<Pending> {
        self.group.start_all_reduce(x, op)
    }

    fn start_all_gather(&self, x: &Tensor) -> CommResult<Pending> {
        Ok(self.noted(self.group.start_all_gather(x)?))
    }

    fn start_reduce_scatter(&self, x: &Tensor) -> CommResult<Pending> {
        Ok(self.noted(self.group.start_reduce_scatter(x)?))
    }

    fn start_all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> CommResult<Pending> {
        Ok(self.noted(self.group.start_all_to_all(x, send, recv)?))
    }

    fn start_broadcast(&self, x: &Tensor, root: usize) -> CommResult<Pending> {
        self.group.start_broadcast(x, root)
    }

    fn start_send_recv(
        &self,
        x: Option<&Tensor>,
        to: Option<usize>,
        recv: Option<Recv>,
    ) -> CommResult<Pending<Option<Tensor>>> {
        self.group.start_send_recv(x, to, recv)
    }

    fn barrier(&self) -> CommResult<()> {
        self.group.barrier()
    }

    fn split(&self, name: &str, lists: &[Vec<usize>]) -> CommResult<Arc<dyn Collective>> {
        self.group.split(name, lists)
    }
}

/// Returns a rank's experts, whose group notes its exchanges.
fn experts(
    group: Arc<dyn Collective>,
    events: &Events,
    dispatcher: TokenDispatcher,
    overlap: Overlap,
) -> ExpertParallel {
    let notes = NotesEvents { group: Arc::clone(&group), events: Arc::clone(events), overlap };
    let ep: Arc<dyn Collective> = Arc::new(notes);
    let (micro_batch, step) = (Arc::clone(&group), group);
    ExpertParallel { ep, n_shards: 1, micro_batch, step, dispatcher }
}

/// Returns a shared expert's output for two tokens, once for each copy: 3 x. Notes forward and backward.
fn shared(x: &Tensor, n_copies: usize, events: &Events) -> Result<Tensor> {
    let noted = Arc::clone(events);
    noted.lock().unwrap().push("shared forward");
    let y = Tensor::cat(&vec![x.affine(3.0, 0.0)?; n_copies], 0)?;
    Ok(record("shared", [x.into()], y, move |dy, _| {
        noted.lock().unwrap().push("shared backward");
        let sum = dy.reshape((n_copies, 2, 3))?.sum(0)?;
        Ok([Some(sum.affine(3.0, 0.0)?)])
    }))
}

/// Returns the events of forward and backward, and the gradient of two tokens. The gradient of outputs is the rank plus 1.
fn events(group: Arc<dyn Collective>, dispatcher: TokenDispatcher) -> Result<(Vec<&'static str>, Vec<f32>)> {
    let events = Events::default();
    let experts = experts(group, &events, dispatcher, Overlap::Allowed);
    let rank = experts.ep.rank() as f32;
    let x = Tensor::full(1f32 + rank, (2, 3), &Device::Cpu)?;
    let tape = Tape::record(&[&x], || {
        let sent = ops::scale(&x, 2.0, DType::F32)?;
        match dispatcher {
            TokenDispatcher::AllToAll => {
                let counts = RowCounts { send: vec![1, 1], recv: vec![1, 1], experts: vec![0, 0] };
                let rows = experts.start_dispatch(sent, &counts)?;
                let shared = shared(&x, 1, &events)?;
                ops::add(&rows.wait()?, &shared)
            }
            TokenDispatcher::AllGather => {
                let sizes = GatherSizes { n_own: 2, n_padded: 2, n_rows: 4 };
                let tokens = experts.start_gather(&sent, &sizes)?;
                let shared = shared(&x, 2, &events)?;
                ops::add(&experts.gathered(&sent, tokens, &sizes)?, &shared)
            }
        }
    })?;
    let dy = Tensor::full(rank + 1.0, tape.output().shape(), &Device::Cpu)?;
    let grad = tape.backward(&dy)?.remove(&x).unwrap().flatten_all()?.to_vec1()?;
    let noted = std::mem::take(&mut events.lock().unwrap().events);
    Ok((noted, grad))
}

#[test]
fn a_shared_expert_computes_while_rows_or_tokens_travel_in_forward_and_backward() {
    for dispatcher in [TokenDispatcher::AllToAll, TokenDispatcher::AllGather] {
        let results = threads::run(2, Options::default(), |world| events(world.group(), dispatcher)).unwrap();
        for (rank, (events, grad)) in results.into_iter().enumerate() {
            assert_eq!(events, ["start", "shared forward", "wait", "start", "shared backward", "wait"]);
            let own = rank as f32 + 1.0;
            let want = match dispatcher {
                // The first row is computed by rank 0, the second by rank 1.
                TokenDispatcher::AllToAll => [1.0, 2.0].map(|of_row| 2.0 * of_row + 3.0 * own),
                // Both ranks compute both tokens, and the shared expert has two copies.
                TokenDispatcher::AllGather => [2.0 * (1.0 + 2.0) + 3.0 * 2.0 * own; 2],
            };
            assert_eq!(grad, [[want[0]; 3], [want[1]; 3]].concat(), "{dispatcher:?}");
        }
    }
}

/// Sublayers of a rank, whose inputs and outputs are noted in forward and backward. Each of both takes virtual time.
struct NotesSublayers(Events);

impl NotesSublayers {
    fn noted(&self, x: &Tensor, [forward, backward]: [&'static str; 2]) -> Result<Tensor> {
        let compute = |timeline: &mut Timeline, event| {
            timeline.push(event);
            timeline.now += HALF;
        };
        compute(&mut self.0.lock().unwrap(), forward);
        let events = Arc::clone(&self.0);
        Ok(record("noted", [x.into()], x.affine(1.0, 0.0)?, move |dy, _| {
            compute(&mut events.lock().unwrap(), backward);
            Ok([Some(dy.clone())])
        }))
    }
}

impl TokenParallel for NotesSublayers {
    fn copy_to_tp(&self, x: &Tensor) -> Result<Tensor> {
        self.noted(x, ["in", "in backward"])
    }

    fn exchanges_inputs(&self) -> bool {
        true
    }

    fn reduce_from_tp(&self, y: &Tensor) -> Result<Tensor> {
        self.noted(y, ["out", "out backward"])
    }
}

/// Returns a layer of four experts, two of which this rank has, with a gated shared expert.
fn layer(rank: usize) -> (Model, UnitWeights) {
    let config = json!({
        "model_type": "qwen2_moe", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16, "initializer_range": 0.5,
    });
    let model = Model::new(Config::from_json(config).unwrap(), None).unwrap();
    let weight = |param: &ParamSpec| {
        let mut values = vec![0.0; param.numel()];
        param.initialise(3, &mut values);
        let whole = Tensor::from_vec(values, param.shape.as_slice(), &Device::Cpu).unwrap();
        let half = param.shape[0] / 2;
        let own = match param.group {
            ParamGroupKind::Dense => whole,
            ParamGroupKind::Expert => whole.narrow(0, rank * half, half).unwrap().contiguous().unwrap(),
        };
        (param.name.clone(), Weight::frozen(own))
    };
    let units = model.units();
    let weights: HashMap<_, _> = units.iter().flat_map(|unit| &unit.params).map(weight).collect();
    let weights = UnitWeights::new(&units[1], weights).unwrap();
    (model, weights)
}

/// Returns the timelines of forward and backward of a layer with its attention.
fn timelines_of_layer(
    group: Arc<dyn Collective>,
    dispatcher: TokenDispatcher,
    overlap: Overlap,
) -> Result<[Timeline; 2]> {
    let events = Events::default();
    let experts = experts(group, &events, dispatcher, overlap);
    let rank = experts.ep.rank();
    let (model, weights) = layer(rank);
    let positions: Vec<u32> = (0..6).collect();
    let (cos, sin) = model.rope(&positions, &model.length_classes(&positions), &Device::Cpu)?;
    let inner = NotesSublayers(Arc::clone(&events));
    let seqs = CuSeqlens::packed(vec![0, 6])?;
    let context = ForwardContext {
        router: RouterContext { settings: &RouterSettings::default(), ..RouterContext::default() },
        parallel_ops: ParallelOps {
            tokens: &ExpertParallelOps { experts: &experts, inner: &inner },
            ..ParallelOps::SINGLE_DEVICE
        },
        ..ForwardContext::on_single_device([&cos, &sin], &seqs)
    };
    let x = Tensor::arange(0f32, 48.0, &Device::Cpu)?.affine(0.1, rank as f64)?.sin()?.reshape((6, 8))?;
    let tape = Tape::record(&[&x], || model.block(&weights, &x, &context))?;
    let forward = std::mem::take(&mut *events.lock().unwrap());
    let dx = tape.backward(&x)?.remove(&x).unwrap();
    assert!(dx.abs()?.sum_all()?.to_scalar::<f32>()? > 0.0);
    let backward = std::mem::take(&mut *events.lock().unwrap());
    Ok([forward, backward])
}

/// Between the start of an exchange and its wait, one part of the shared expert begins and the other ends.
#[test]
fn the_shared_expert_of_a_layer_computes_during_dispatch_and_combine() {
    let attention = ["in", "out"];
    let counts = ["start", "wait"];
    let combine = ["start", "out", "wait"];
    for (dispatcher, dispatch) in [
        (TokenDispatcher::AllToAll, &["start", "start", "in", "wait", "wait"][..]),
        (TokenDispatcher::AllGather, &["start", "start", "start", "in", "wait", "wait", "wait"]),
    ] {
        let ranks = threads::run(2, Options::default(), |world| {
            timelines_of_layer(world.group(), dispatcher, Overlap::Allowed)
        })
        .unwrap();
        for [forward, backward] in ranks.into_iter().map(|timelines| timelines.map(|timeline| timeline.events)) {
            assert_eq!(forward, [&attention[..], &counts, dispatch, &combine].concat(), "{dispatcher:?}");
            let combine = ["start", "out backward", "wait"];
            let dispatch = ["start", "start", "in backward", "wait", "wait"];
            let attention = ["out backward", "in backward"];
            assert_eq!(backward, [&combine[..], &dispatch, &attention].concat(), "{dispatcher:?}");
        }
    }
}

/// A layer has attention, a shared expert, an exchange of counts, a dispatch of several messages and a combine of one. The halves
/// of the shared expert take less time than a message, so the overlap hides both of them.
#[test]
fn the_shared_expert_takes_no_time_while_messages_travel() {
    for (dispatcher, n_dispatched) in [(TokenDispatcher::AllToAll, 2), (TokenDispatcher::AllGather, 3)] {
        let times = |overlap| {
            let of_rank = |world: &candlewick_comm::World| timelines_of_layer(world.group(), dispatcher, overlap);
            let ranks = threads::run(2, Options::default(), of_rank).unwrap();
            ranks.into_iter().map(|timelines| timelines.map(|timeline| timeline.now)).collect::<Vec<_>>()
        };
        for ([forward, backward], blocking) in times(Overlap::Allowed).into_iter().zip(times(Overlap::Prevented)) {
            assert_eq!(forward, 2 * HALF + (1 + n_dispatched + 1) * MESSAGE, "{dispatcher:?}");
            assert_eq!(backward, 2 * HALF + 3 * MESSAGE, "{dispatcher:?}");
            assert_eq!(blocking, [forward + 2 * HALF, backward + 2 * HALF], "{dispatcher:?}");
        }
    }
}
