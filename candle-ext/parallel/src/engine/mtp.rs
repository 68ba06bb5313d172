//! Training of the layers for multi-token prediction (MTP), on the stage of the head.
//!
//! Layer k predicts each position's target k positions later, from the final norm's output (k = 1) or from layer k - 1. As in
//! Megatron-LM, its loss has the coefficient `mtp_loss_scaling_factor` over the number of MTP layers. Backward follows
//! at once, so activation checkpointing does not apply.
//!
//! The `memory` module mirrors the allocations of these functions: change both.

use candle_core::{Result, Tensor};
use candlewick_model::{ForwardContext, UnitWeights};
use candlewick_ops::{Reduction, Tape, add, span};

use super::Engine;
use super::loss::{LossFactors, LossSums};
use crate::batch::Micro;
use crate::params::MicroBatch;

/// A micro-batch whose MTP layers are trained.
pub(super) struct MtpPass<'a> {
    /// Weights of the head.
    pub(super) head: &'a UnitWeights,
    /// The whole micro-batch, before it is split over context parallel ranks.
    pub(super) micro: &'a Micro,
    pub(super) context: &'a ForwardContext<'a>,
    pub(super) position: MicroBatch,
    /// Factors of the layers' auxiliary losses.
    pub(super) factors: LossFactors<'a>,
}

/// An MTP layer between its forward and its backward.
struct MtpForward {
    input: Tensor,
    tape: Tape,
    /// Gradient of the output, from the layer's own loss.
    dy: Tensor,
}

/// Returns the name of an MTP layer's loss, as in Megatron-LM: `mtp_1 loss` for the first.
pub fn mtp_loss_name(depth: usize) -> String {
    format!("mtp_{depth} loss")
}

impl Engine {
    /// Computes the losses of the MTP layers and runs their backward. Returns the gradient of the final norm's output
    /// `normed_td`; `None` without MTP layers.
    pub(super) fn mtp_backward(
        &self,
        pass: &MtpPass,
        normed_td: &Tensor,
        sums: &mut LossSums,
    ) -> Result<Option<Tensor>> {
        let n_layers = self.model.config().n_mtp_layers();
        if n_layers == 0 {
            return Ok(None);
        }
        let _span = span("mtp", "forward and backward");
        let (mut micro, mut hidden) = (pass.micro.clone(), normed_td.clone());
        let mut layers = Vec::new();
        for depth in 1..=n_layers {
            micro = micro.shifted()?;
            let layer = self.mtp_forward(pass, depth, &hidden, &micro, sums)?;
            // The backward of the last layer comes next and uses its weights at once.
            if depth < n_layers {
                self.store.release(self.mtp_layer_idx(depth) + 1);
            }
            hidden = layer.tape.output().clone();
            layers.push(layer);
        }
        let mut dx: Option<Tensor> = None;
        for (i, MtpForward { input, tape, dy }) in layers.into_iter().enumerate().rev() {
            let layer_idx = self.mtp_layer_idx(i + 1);
            let unit_idx = layer_idx + 1;
            self.store.fetch(unit_idx)?;
            self.store.prepare_grads(unit_idx)?;
            let dy = dx.map_or(Ok(dy.clone()), |dx| add(&dy, &dx))?;
            dx = Some(sums.input_grad(layer_idx, tape, (&input, &dy), pass.factors)?);
            self.release_unit(unit_idx, pass.position)?;
        }
        Ok(dx)
    }

    /// Runs the forward of an MTP layer, and forward and backward of its loss.
    fn mtp_forward(
        &self,
        pass: &MtpPass,
        depth: usize,
        input: &Tensor,
        micro: &Micro,
        sums: &mut LossSums,
    ) -> Result<MtpForward> {
        let MtpPass { head, context, .. } = pass;
        let (layer_idx, own) = (self.mtp_layer_idx(depth), self.part(micro)?.micro);
        // The head, which ties the embedding, releases it.
        let (embedding, weights) = (self.store.fetch(0)?, self.store.fetch(layer_idx + 1)?);
        let tape = Tape::record(&[input], || {
            let embedded = self.model.embed(embedding, &own.ids, context.parallel_ops.tokens)?;
            self.model.mtp_layer(weights, input, &embedded, context)
        })?;
        let (lm_head, name) = (self.model.lm_head(head)?, mtp_loss_name(depth));
        let dy = self.hidden_states_grad(tape.output(), context.parallel_ops, |normed| {
            sums.add_loss(layer_idx, &name, context.parallel_ops.tokens.sequence_parallel_size(), |upstream| {
                self.cross_entropy(normed, &lm_head, &own.targets, Reduction::Sum, upstream)
            })
        })?;
        Ok(MtpForward { input: input.clone(), tape, dy })
    }

    /// Returns the layer index of an MTP layer; `depth` counts from 1.
    fn mtp_layer_idx(&self, depth: usize) -> usize {
        self.model.n_blocks() + depth - 1
    }
}
