//! Pipeline parallelism: a stage has some of the blocks, and sends their output to the next stage.

mod layout;
mod schedule;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Result, Tensor, bail};
use candlewick_comm::{Collective, Pending, Recv, Solo};

pub use layout::PipelineLayout;
pub use schedule::{ChunkPass, PipelineSchedule, PipelineScheduleKind, StageStep};

/// A stage of a pipeline, and its channels to its neighbours.
pub struct Pipeline {
    stages: Arc<dyn Collective>,
    layout: PipelineLayout,
    schedule: PipelineScheduleKind,
    activations: P2pChannels,
    gradients: P2pChannels,
    /// What is on its way to neighbours.
    sent: Mutex<VecDeque<Pending<Option<Tensor>>>>,
}

/// The dtype and shape of the hidden states that stages send each other, and of their gradients.
#[derive(Clone, Debug)]
pub(crate) struct HiddenStates {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

/// ParallelGroups of two, this stage and a neighbour, for tensors of one kind in one direction. Both ends of a group send and receive in
/// one order.
struct P2pChannels {
    /// The group with the next stage; the last one's is the first, which may have the next chunk.
    next: Arc<dyn Collective>,
    previous: Arc<dyn Collective>,
}

/// Ranks within a group of two.
const SENDER: usize = 0;
const RECEIVER: usize = 1;

impl Pipeline {
    /// Makes the pipeline of one stage.
    pub fn alone(n_blocks: usize) -> Self {
        let solo = || Arc::new(Solo) as Arc<dyn Collective>;
        let channels = || P2pChannels { next: solo(), previous: solo() };
        let (layout, schedule, sent) =
            (PipelineLayout::whole(n_blocks), PipelineScheduleKind::default(), Mutex::default());
        Self { stages: solo(), layout, schedule, activations: channels(), gradients: channels(), sent }
    }

    /// Connects `stages`, which have the runs of `layout` and all call this.
    pub fn new(stages: Arc<dyn Collective>, layout: PipelineLayout, schedule: PipelineScheduleKind) -> Result<Self> {
        if layout.n_stages() != stages.size() {
            bail!("a pipeline of {} stages among {} ranks", layout.n_stages(), stages.size())
        }
        let activations = P2pChannels::new(&*stages, "activations")?;
        let gradients = P2pChannels::new(&*stages, "gradients")?;
        Ok(Self { stages, layout, schedule, activations, gradients, sent: Mutex::default() })
    }

    /// Returns which stage this is.
    pub fn stage(&self) -> usize {
        self.stages.rank()
    }

    /// Returns the stages of one copy of the model.
    pub(crate) fn stages(&self) -> &dyn Collective {
        &*self.stages
    }

    /// Returns which blocks each stage has.
    pub fn layout(&self) -> &PipelineLayout {
        &self.layout
    }

    /// Returns this stage's steps for `n_micros` micro-batches.
    pub(crate) fn steps(&self, n_micros: usize) -> Vec<StageStep> {
        let table = PipelineSchedule::new(self.schedule, self.layout.n_stages(), self.layout.n_chunks(), n_micros);
        table.of_stage(self.stage()).collect()
    }

    /// Hands what a run gave to the next one.
    pub(crate) fn send_activation(&self, y: &Tensor) -> Result<()> {
        self.send(&*self.activations.next, y, RECEIVER)
    }

    /// Waits for what the run before gave.
    pub(crate) fn receive_activation(&self, expected: HiddenStates) -> Result<Tensor> {
        receive(&*self.activations.previous, SENDER, expected)
    }

    /// Hands the gradient of what a run read to the one before.
    pub(crate) fn send_gradient(&self, dx: &Tensor) -> Result<()> {
        self.send(&*self.gradients.previous, dx, SENDER)
    }

    /// Waits for the gradient of what a run gave.
    pub(crate) fn receive_gradient(&self, expected: HiddenStates) -> Result<Tensor> {
        receive(&*self.gradients.next, RECEIVER, expected)
    }

    /// Waits until all that was sent is received.
    pub(crate) fn finish(&self) -> Result<()> {
        self.finish_all_but(0)
    }

    /// Waits until all but the last few of what was sent is received.
    pub(crate) fn finish_all_but(&self, n_last: usize) -> Result<()> {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        while sent.len() > n_last {
            if let Some(oldest) = sent.pop_front() {
                oldest.wait()?;
            }
        }
        Ok(())
    }

    fn send(&self, channel: &dyn Collective, x: &Tensor, to: usize) -> Result<()> {
        let pending = channel.start_send_recv(Some(&x.contiguous()?), Some(to), None)?;
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).push_back(pending);
        Ok(())
    }
}

fn receive(channel: &dyn Collective, from: usize, HiddenStates { dtype, shape }: HiddenStates) -> Result<Tensor> {
    match channel.send_recv(None, None, Some(Recv { from, dtype, shape }))? {
        Some(x) => Ok(x),
        None => bail!("a stage of a pipeline was sent nothing"),
    }
}

impl P2pChannels {
    fn new(stages: &dyn Collective, what: &str) -> Result<Self> {
        let (rank, n) = (stages.rank(), stages.size());
        // Edges of one colour meet at no stage: one split makes their groups.
        let colour = |from: usize| if from + 1 == n && !n.is_multiple_of(2) { 2 } else { from % 2 };
        let groups: Vec<_> = (0..3)
            .map(|of| {
                let edges = (0..n).filter(|from| colour(*from) == of && n > 1);
                let mut lists: Vec<Vec<usize>> = edges.map(|from| vec![from, (from + 1) % n]).collect();
                let alone = (0..n).filter(|stage| !lists.iter().flatten().any(|other| other == stage));
                let alone: Vec<_> = alone.map(|stage| vec![stage]).collect();
                lists.extend(alone);
                Ok(stages.split(&format!("pipeline {what}"), &lists)?)
            })
            .collect::<Result<_>>()?;
        let edge = |from: usize| Arc::clone(&groups[colour(from)]);
        Ok(Self { next: edge(rank), previous: edge((rank + n - 1) % n) })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;
    use candlewick_comm::{Options, threads};

    /// Every stage hears from the one before, the first one from the last.
    #[test]
    fn stages_reach_their_neighbours_around_the_ring() {
        for n in 2..=5 {
            let heard = threads::run(n, Options::default(), |world| -> Result<[f32; 2]> {
                let layout = PipelineLayout::new(n, &vec![1; n]);
                let pipeline = Pipeline::new(world.group(), layout, PipelineScheduleKind::default())?;
                let own = Tensor::new(world.rank() as f32, &Device::Cpu)?;
                pipeline.send_activation(&own)?;
                pipeline.send_gradient(&own)?;
                let scalar = || HiddenStates { dtype: DType::F32, shape: vec![] };
                let heard = [pipeline.receive_activation(scalar())?, pipeline.receive_gradient(scalar())?];
                pipeline.finish()?;
                Ok([heard[0].to_scalar()?, heard[1].to_scalar()?])
            });
            let want: Vec<_> = (0..n).map(|rank| [((rank + n - 1) % n) as f32, ((rank + 1) % n) as f32]).collect();
            assert_eq!(heard.unwrap(), want);
        }
    }
}
