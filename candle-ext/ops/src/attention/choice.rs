//! Selection of the attention implementation for a call.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::cu_seqlens::CuSeqlens;
use super::layout::HeadCounts;
use super::spec::{AttentionChoice, AttentionHeads, AttentionImpl, AttentionPasses, AttentionSpec, ModelAttention};
use crate::batch_invariance::is_batch_invariant;

/// Implementation that computes one call.
pub(super) enum AttentionKernel {
    Reference,
    Fused,
    #[cfg(feature = "cudnn")]
    Cudnn(Box<super::cudnn::CudnnPlan>),
    #[cfg(feature = "flash-attn")]
    Flash,
}

impl AttentionChoice {
    /// Describes the implementation that computes `passes` of a model on a device; `None` if there is only one.
    ///
    /// # Errors
    ///
    /// If the implementation chosen by name is unusable. The call may load cuDNN and build graphs.
    pub fn explain(
        self,
        device: &Device,
        dtype: DType,
        model: ModelAttention,
        passes: AttentionPasses,
    ) -> Result<Option<String>> {
        let AttentionHeads { n_query, n_kv, dim } = model.heads;
        let q = Tensor::zeros((2, n_query, dim), dtype, device)?;
        let scale = (dim as f32).powf(-0.5);
        let heads = HeadCounts { n_kv, group: n_query / n_kv.max(1), dim };
        let choose = |n_tokens: usize, window| {
            let spec = AttentionSpec { scale, causal: true, window, choice: self };
            choose(&q, &CuSeqlens::packed(vec![0, n_tokens])?, &spec, heads, passes)
        };
        let usual = describe(choose(2, None)?, device);
        let Some(window) = model.window.filter(|&window| window < model.max_tokens) else { return Ok(usual) };
        let windowed = describe(choose(model.max_tokens, Some(window))?, device);
        Ok(if windowed == usual { usual } else { Some(with_window(usual, windowed, window)) })
    }
}

/// Describes a chosen implementation; `None` if there is only one.
fn describe((kernel, why_not_cudnn): (AttentionKernel, Option<String>), device: &Device) -> Option<String> {
    match (kernel, why_not_cudnn) {
        (AttentionKernel::Reference, _) => Some("attention: reference, with all scores of a sequence in memory".into()),
        (AttentionKernel::Fused, Some(why)) if device.is_cuda() => Some(format!("attention: fused; not cuDNN: {why}")),
        (AttentionKernel::Fused, _) => None,
        #[cfg(feature = "cudnn")]
        (AttentionKernel::Cudnn(plan), _) => Some(format!("attention: {}", plan.describe())),
        #[cfg(feature = "flash-attn")]
        (AttentionKernel::Flash, _) => Some("attention: FlashAttention 2".into()),
    }
}

/// Joins the description of calls without and with a sliding window.
fn with_window(usual: Option<String>, windowed: Option<String>, window: usize) -> String {
    let usual = usual.unwrap_or_else(|| "attention: fused".into());
    let windowed = windowed.unwrap_or_else(|| "attention: fused".into());
    format!("{usual}; with a window of {window} tokens: {}", windowed.trim_start_matches("attention: "))
}

/// Selects the implementation. Also returns the reason why cuDNN was not selected, if it was considered.
pub(super) fn choose(
    q: &Tensor,
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    heads: HeadCounts,
    passes: AttentionPasses,
) -> Result<(AttentionKernel, Option<String>)> {
    if is_batch_invariant() && matches!(spec.choice.implementation, AttentionImpl::Cudnn | AttentionImpl::Flash) {
        bail!(
            "attention: the rows of cuDNN and flash depend on the batch; with batch_invariant choose `fused` or `auto`"
        )
    }
    match spec.choice.implementation {
        AttentionImpl::Reference => Ok((AttentionKernel::Reference, None)),
        AttentionImpl::Fused => Ok((AttentionKernel::Fused, None)),
        AttentionImpl::Cudnn => match cudnn(q, seqs, spec, heads, passes) {
            Ok(kernel) => Ok((kernel, None)),
            Err(why) => bail!("attention: cuDNN is requested but unusable: {why}; choose `fused` or `auto`"),
        },
        AttentionImpl::Flash => match flash(q.device(), passes) {
            Ok(kernel) => Ok((kernel, None)),
            Err(why) => bail!("attention: flash is requested but unusable: {why}; choose `fused` or `auto`"),
        },
        AttentionImpl::Auto => match left_to_cudnn(seqs, spec).and_then(|()| cudnn(q, seqs, spec, heads, passes)) {
            Ok(kernel) => Ok((kernel, None)),
            // cuDNN's message lists its engines after the first line.
            Err(why) => Ok((AttentionKernel::Fused, why.lines().next().map(str::to_owned))),
        },
    }
}

/// Returns the reason why `auto` prefers the fused kernel over cuDNN, if any.
fn left_to_cudnn(seqs: &CuSeqlens, spec: &AttentionSpec) -> std::result::Result<(), String> {
    if is_batch_invariant() {
        return Err("its plan depends on the batch".into());
    }
    if spec.choice.deterministic {
        return Err("its deterministic backward takes memory quadratic in the length".into());
    }
    if seqs.cu_seqlens_q() != seqs.cu_seqlens_k() {
        return Err("it is not used with a KV cache".into());
    }
    if seqs.spans().all(|span| span.k.len() <= 1) {
        // cuDNN's release notes exclude a backward over one key. A batch in which only some sequences are that short
        // works.
        return Err("no sequence has more than one token".into());
    }
    Ok(())
}

/// Returns true if cuDNN can read tensors at these addresses.
///
/// `auto` computes misaligned views by the fused kernel. Under `cudnn` they are copied first.
#[cfg(any(feature = "cudnn", test))]
pub(super) fn takes_addresses(choice: AttentionChoice, addresses: &[u64]) -> bool {
    const ALIGNMENT: u64 = 16;
    choice.implementation != AttentionImpl::Auto || addresses.iter().all(|address| address.is_multiple_of(ALIGNMENT))
}

/// Computes by cuDNN. Under `auto`, falls back to the fused kernel if cuDNN refuses the call at run time.
///
/// # Errors
///
/// A refusal under `cudnn`, and any other failure.
#[cfg(any(feature = "cudnn", test))]
pub(super) fn or_fused<T>(
    choice: AttentionChoice,
    cudnn: impl FnOnce() -> Result<std::result::Result<T, String>>,
    fused: impl FnOnce() -> Result<T>,
) -> Result<T> {
    match (cudnn()?, choice.implementation) {
        (Ok(computed), _) => Ok(computed),
        (Err(_), AttentionImpl::Auto) => fused(),
        (Err(why), _) => bail!("attention: cuDNN is requested but failed: {why}; choose `fused` or `auto`"),
    }
}

#[cfg(feature = "cudnn")]
fn cudnn(
    q: &Tensor,
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    heads: HeadCounts,
    passes: AttentionPasses,
) -> std::result::Result<AttentionKernel, String> {
    super::cudnn::plan(q, seqs, spec, heads, passes).map(|plan| AttentionKernel::Cudnn(Box::new(plan)))
}

#[cfg(not(feature = "cudnn"))]
fn cudnn(
    q: &Tensor,
    _: &CuSeqlens,
    _: &AttentionSpec,
    _: HeadCounts,
    _: AttentionPasses,
) -> std::result::Result<AttentionKernel, String> {
    Err(match q.device() {
        Device::Cpu => "it computes on GPUs only, and this is the CPU".into(),
        _ => "this program was built without the cudnn feature; scripts/build-gpu builds one with it".into(),
    })
}

fn flash(device: &Device, passes: AttentionPasses) -> std::result::Result<AttentionKernel, &'static str> {
    match (device, passes) {
        (Device::Cuda(_), AttentionPasses::Forward) => {}
        (Device::Cuda(_), AttentionPasses::Both) => return Err("it has no backward"),
        _ => return Err("it computes on GPUs only"),
    }
    #[cfg(feature = "flash-attn")]
    return Ok(AttentionKernel::Flash);
    #[cfg(not(feature = "flash-attn"))]
    Err("this program was built without the flash-attn feature")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn by(implementation: AttentionImpl) -> AttentionChoice {
        AttentionChoice { implementation, deterministic: false }
    }

    fn spec(choice: AttentionChoice) -> AttentionSpec {
        AttentionSpec { scale: 1.0, causal: true, window: None, choice }
    }

    #[track_caller]
    fn check_left(seqs: &CuSeqlens, choice: AttentionChoice, want: Option<&str>) {
        let left = left_to_cudnn(seqs, &spec(choice)).err();
        match want {
            None => assert_eq!(left, None),
            Some(part) => assert!(left.as_ref().is_some_and(|why| why.contains(part)), "{left:?}"),
        }
    }

    #[test]
    fn auto_leaves_batches_of_single_tokens_remembered_keys_and_fixed_orders_to_fused() {
        let auto = by(AttentionImpl::Auto);
        for (lens, want) in [
            (vec![0, 1], Some("no sequence has more than one token")),
            (vec![0, 1, 1, 2, 3], Some("no sequence has more than one token")),
            (vec![0, 1, 3], None),
            (vec![0, 1, 1, 300, 301], None),
        ] {
            check_left(&CuSeqlens::packed(lens).unwrap(), auto, want);
        }
        check_left(&CuSeqlens::from_q_and_k(vec![0, 1], vec![0, 9]).unwrap(), auto, Some("with a KV cache"));
        let deterministic = AttentionChoice { deterministic: true, ..auto };
        check_left(&CuSeqlens::packed(vec![0, 9]).unwrap(), deterministic, Some("quadratic in the length"));
    }

    #[test]
    fn the_description_names_the_implementation_of_windows_if_it_is_another() {
        let usual = Some("attention: cuDNN 9.14.0".to_owned());
        let windowed = Some("attention: fused; not cuDNN: it gives NaN".to_owned());
        let want = "attention: cuDNN 9.14.0; with a window of 4096 tokens: fused; not cuDNN: it gives NaN";
        assert_eq!(with_window(usual, windowed, 4096), want);
    }

    #[test]
    fn auto_leaves_misaligned_tensors_to_fused() {
        let of = |implementation, addresses: &[u64]| takes_addresses(by(implementation), addresses);
        assert!(of(AttentionImpl::Auto, &[0x1000, 0x2010, 0x3000]));
        for i in 0..3 {
            let mut addresses = [0x1000, 0x2010, 0x3000];
            addresses[i] += 8;
            assert!(!of(AttentionImpl::Auto, &addresses) && of(AttentionImpl::Cudnn, &addresses));
        }
    }

    /// Runs a fake cuDNN. Returns the result and the number of calls of the fused kernel.
    fn run(implementation: AttentionImpl, cudnn: Result<std::result::Result<&str, String>>) -> (Result<&str>, usize) {
        let n_fused = Cell::new(0);
        let fused = || {
            n_fused.set(n_fused.get() + 1);
            Ok("fused")
        };
        (or_fused(by(implementation), || cudnn, fused), n_fused.get())
    }

    #[test]
    fn auto_computes_by_fused_what_cudnn_refuses_when_it_runs() {
        let (result, n_fused) = run(AttentionImpl::Auto, Ok(Ok("cudnn")));
        assert_eq!((result.unwrap(), n_fused), ("cudnn", 0));
        let (result, n_fused) = run(AttentionImpl::Auto, Ok(Err("EXECUTION_FAILED".into())));
        assert_eq!((result.unwrap(), n_fused), ("fused", 1));
    }

    #[test]
    fn by_name_a_refusal_is_an_error_and_a_failure_is_one_in_both() {
        let (result, n_fused) = run(AttentionImpl::Cudnn, Ok(Err("EXECUTION_FAILED".into())));
        let error = result.unwrap_err().to_string();
        assert!(error.contains("cuDNN is requested but failed: EXECUTION_FAILED") && n_fused == 0, "{error}");
        for implementation in [AttentionImpl::Auto, AttentionImpl::Cudnn] {
            let (result, n_fused) = run(implementation, Err(candle_core::Error::Msg("out of memory".into())));
            assert!(result.unwrap_err().to_string().contains("out of memory") && n_fused == 0);
        }
    }
}
