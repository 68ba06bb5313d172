//! Pipeline parallelism: each stage computes some of the layers and sends activations to the next stage.

mod layout;
mod schedule;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Result, Tensor, bail};
use candlewick_comm::{Collective, Pending, Recv, Solo};

pub use layout::PipelineLayout;
pub use schedule::{ChunkPass, PipelineSchedule, PipelineScheduleKind, StageStep};

/// A pipeline stage and its point-to-point channels.
pub struct Pipeline {
    stages: Arc<dyn Collective>,
    layout: PipelineLayout,
    schedule: PipelineScheduleKind,
    activations: P2pChannels,
    gradients: P2pChannels,
    /// Sends that are not yet complete.
    sent: Mutex<VecDeque<Pending<Option<Tensor>>>>,
}

/// Dtype and shape of hidden states (or their gradients) between stages.
#[derive(Clone, Debug)]
pub(crate) struct HiddenStates {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

/// Process groups of two adjacent stages, for one direction. Both ends must send and receive in the same order.
struct P2pChannels {
    /// Group with the next stage. The last stage's is with the first, for interleaved schedules.
    next: Arc<dyn Collective>,
    previous: Arc<dyn Collective>,
}

/// Rank of the sender in a group of two.
const SENDER: usize = 0;
/// Rank of the receiver in a group of two.
const RECEIVER: usize = 1;

impl Pipeline {
    /// Creates a pipeline of a single stage.
    pub fn alone(n_blocks: usize) -> Self {
        let solo = || Arc::new(Solo) as Arc<dyn Collective>;
        let channels = || P2pChannels { next: solo(), previous: solo() };
        let (layout, schedule, sent) =
            (PipelineLayout::single_stage(n_blocks), PipelineScheduleKind::default(), Mutex::default());
        Self { stages: solo(), layout, schedule, activations: channels(), gradients: channels(), sent }
    }

    /// Connects the stages of `layout`. Collective: all of `stages` must call it.
    pub fn new(stages: Arc<dyn Collective>, layout: PipelineLayout, schedule: PipelineScheduleKind) -> Result<Self> {
        if layout.n_stages() != stages.size() {
            bail!("a pipeline of {} stages among {} ranks", layout.n_stages(), stages.size())
        }
        let activations = P2pChannels::new(&*stages, "activations")?;
        let gradients = P2pChannels::new(&*stages, "gradients")?;
        Ok(Self { stages, layout, schedule, activations, gradients, sent: Mutex::default() })
    }

    /// Returns the index of this stage.
    pub fn stage(&self) -> usize {
        self.stages.rank()
    }

    /// Returns the process group of the stages.
    pub(crate) fn stages(&self) -> &dyn Collective {
        &*self.stages
    }

    /// Returns the layers of each stage.
    pub fn layout(&self) -> &PipelineLayout {
        &self.layout
    }

    /// Returns this stage's steps for `n_micros` micro-batches.
    pub(crate) fn steps(&self, n_micros: usize) -> Vec<StageStep> {
        let table = PipelineSchedule::new(self.schedule, self.layout.n_stages(), self.layout.n_chunks(), n_micros);
        table.stage_steps(self.stage()).collect()
    }

    /// Sends a chunk's output to the next chunk.
    pub(crate) fn send_activation(&self, y: &Tensor) -> Result<()> {
        self.send(&*self.activations.next, y, RECEIVER)
    }

    /// Receives the input of a chunk.
    pub(crate) fn receive_activation(&self, expected: HiddenStates) -> Result<Tensor> {
        receive(&*self.activations.previous, SENDER, expected)
    }

    /// Sends the gradient of a chunk's input to the previous chunk.
    pub(crate) fn send_gradient(&self, dx: &Tensor) -> Result<()> {
        self.send(&*self.gradients.previous, dx, SENDER)
    }

    /// Receives the gradient of a chunk's output.
    pub(crate) fn receive_gradient(&self, expected: HiddenStates) -> Result<Tensor> {
        receive(&*self.gradients.next, RECEIVER, expected)
    }

    /// Waits until all sends are complete.
    pub(crate) fn finish(&self) -> Result<()> {
        self.finish_all_but(0)
    }

    /// Waits until all but the last `n_last` sends are complete.
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
        None => bail!("a pipeline stage received no tensor"),
    }
}

impl P2pChannels {
    fn new(stages: &dyn Collective, what: &str) -> Result<Self> {
        let (rank, n) = (stages.rank(), stages.size());
        // Edges of one color share no stage, so one group split creates their groups.
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

    /// Every stage receives from the previous one, the first stage from the last.
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
