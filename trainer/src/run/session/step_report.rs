//! The report of a step: its record in the metrics, and its FLOPs.

use candlewick_model::TiledMlp;
use candlewick_ops::{LossScaling, UpdateOutcome};
use candlewick_parallel::ActivationCheckpointing;
use serde_json::json;

use crate::data::GlobalBatch;
use crate::metrics::{
    AttentionPairs, FlopFactors, GpuMonitor, Memory, ModelShape, Recomputed, StepRecord, flops, recomputed_flops,
};
use crate::run::step::StepOutcome;

use super::Session;

/// The operations to count.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    /// All computed operations: attention over all pairs, as ArcticTraining counts it, and recomputation.
    All,
    /// The useful operations: causal attention, without recomputation.
    Useful,
}

impl Session<'_> {
    /// Reports the result of a step on the terminal, to the trackers and in run.json.
    pub(super) fn report(&mut self, step: &GlobalBatch, outcome: &StepOutcome) {
        let decision = &outcome.decision;
        if decision.outcome == UpdateOutcome::Overflowed {
            let (number, scale) = (outcome.number, decision.next.loss_scale);
            let line = format!("skipped step {number}: its gradient overflowed; the loss scale is now {scale}");
            self.reporter.terminal().line(&line);
        }
        let data_world = self.run.ranks.rank_info.data_world;
        let (n_micros, n_rounds) = (step.micro_batches.len() as f64, step.n_micros(data_world) as f64);
        let n_ranks = self.run.plan.ranks.n_ranks();
        let step_time = outcome.elapsed.as_secs_f64();
        let tera_flops = self.flops(step, Work::All) / n_ranks as f64 / 1e12;
        let useful_flops = self.flops(step, Work::Useful) / n_ranks as f64;
        let padded: usize = step.micro_batches.iter().map(|batch| batch.ids.len()).sum();
        let record = StepRecord {
            epoch: step.epoch,
            iter: outcome.number,
            lr: outcome.lr,
            lr_groups: self.run.plan.optimizer.group_rates(outcome.lr),
            loss: outcome.loss,
            auxiliary_losses: outcome.auxiliary.clone(),
            objective: outcome.metrics.clone(),
            expert_load: outcome.expert_load.clone(),
            grad_norm: decision.norm,
            num_zeros: outcome.grad_zeros,
            loss_scale: (self.run.plan.optimizer.loss_scaling != LossScaling::NONE).then_some(decision.next.loss_scale),
            seqlen: padded as f64 / n_micros,
            iter_time: step_time / n_rounds,
            iter_tflops: tera_flops / step_time,
            step_time,
            step_tflops: tera_flops / step_time,
            tokens: step.n_tokens() as u64,
            n_targets: step.n_targets as u64,
            tokens_per_second: step.n_tokens() as f64 / step_time,
            mfu: self.peak.as_mut().map(|peak| peak.utilization(useful_flops, step_time)),
            memory: Memory::now(),
            gpu_memory: self.monitor.as_ref().map(GpuMonitor::memory),
            wall_clock_ms: outcome.wall_clock,
            gpu_energy_joules: self.monitor.as_ref().and_then(GpuMonitor::energy),
        };
        self.reporter.log_step(&record);
        if let Some(times) = outcome.wall_clock {
            self.reporter.terminal().line(&times.to_string());
        }
        let (token_stats, n_skipped) = (json!(self.token_stats()), self.progress.n_skipped);
        self.update_run_json(|report| {
            report.metrics["step"] = json!(record);
            report.token_stats = token_stats;
            report.skipped_steps = n_skipped;
        });
    }

    /// Returns the FLOPs of a step, summed over all ranks.
    fn flops(&self, step: &GlobalBatch, work: Work) -> f64 {
        let shape = ModelShape::of(self.run.engine.model());
        let (attention_pairs, again) = match work {
            Work::All => {
                (AttentionPairs::Full, recomputed(self.run.engine.checkpointing(), self.run.engine.tiled_mlp()))
            }
            Work::Useful => (AttentionPairs::Causal, Vec::new()),
        };
        let factors = if self.run.plan.model.adapter.is_some() { FlopFactors::ADAPTER } else { FlopFactors::TRAIN };
        let of_batch = |ends: &[usize]| {
            let lengths: Vec<usize> = ends.windows(2).map(|pair| pair[1] - pair[0]).collect();
            flops(&shape, factors, attention_pairs, &lengths) + recomputed_flops(&shape, &again, &lengths)
        };
        step.micro_batches.iter().map(|batch| of_batch(&batch.cu_seqlens)).sum()
    }
}

/// Returns the recomputed parts of each layer. Tiled MLPs are recomputed once more than their layer.
fn recomputed(kept: &[ActivationCheckpointing], tiled_mlp: TiledMlp) -> Vec<Recomputed> {
    let of_layer = |kept: &ActivationCheckpointing| {
        let layer = *kept != ActivationCheckpointing::None;
        let attention = layer && *kept != ActivationCheckpointing::Selective;
        Recomputed { layer, attention, tiled_mlp: tiled_mlp == TiledMlp::On }
    };
    kept.iter().map(of_layer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpointed_layers_and_tiled_mlps_are_recomputed() {
        use ActivationCheckpointing::{Full, None, Offload, Selective};
        let counts = |kept: &[ActivationCheckpointing], tiled_mlp| {
            let again = recomputed(kept, tiled_mlp);
            let n = |is_again: fn(&Recomputed) -> bool| again.iter().filter(|layer| is_again(layer)).count();
            (n(|layer| layer.layer), n(|layer| layer.attention), n(|layer| layer.tiled_mlp))
        };
        assert_eq!(counts(&[None; 3], TiledMlp::Off), (0, 0, 0));
        assert_eq!(counts(&[Full, None, Full], TiledMlp::Off), (2, 2, 0));
        assert_eq!(counts(&[Selective, None, Full], TiledMlp::Off), (2, 1, 0));
        assert_eq!(counts(&[Offload, Offload, Full], TiledMlp::On), (3, 3, 3));
        assert_eq!(counts(&[None; 3], TiledMlp::On), (0, 0, 3));
    }
}
