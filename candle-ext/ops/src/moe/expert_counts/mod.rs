//! Numbers of tokens of each expert, by sequence.

#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Tensor, bail};

use crate::device::on_device;
use crate::storage::host;

const OP: &str = "expert_counts";

/// Sequences of packed tokens.
#[derive(Clone, Copy, Debug)]
pub struct TokenSequences<'a> {
    /// Sequence of each token, u32 [t].
    pub of_tokens: &'a Tensor,
    /// Number of sequences.
    pub n_sequences: usize,
}

/// Counts the slots of each expert, f32 [s, e], for experts u32 [t, k] below `n_experts`. Other experts, such as
/// [`DROPPED`](crate::DROPPED), do not count. Without sequences, all tokens are of one.
pub fn expert_counts(experts: &Tensor, sequences: Option<TokenSequences<'_>>, n_experts: usize) -> Result<Tensor> {
    if experts.dtype() != DType::U32 || experts.rank() != 2 {
        bail!("{OP}: want u32 experts [t, k], got {:?} {:?}", experts.dtype(), experts.dims())
    }
    let (of_tokens, n_sequences) = match sequences {
        Some(TokenSequences { of_tokens, n_sequences }) => (Some(of_tokens.contiguous()?), n_sequences),
        None => (None, 1),
    };
    check_sequences(OP, of_tokens.as_ref(), experts.dims()[0])?;
    let shape = [n_sequences, n_experts];
    if experts.elem_count() == 0 {
        return Tensor::zeros(&shape, DType::F32, experts.device());
    }
    let experts = experts.contiguous()?;
    on_device!(OP, experts, {
        cpu => {
            let of_tokens = of_tokens.as_ref().map(|tensor| host(OP, tensor)).transpose()?;
            let of_tokens = of_tokens.as_ref().map(|values| values.slice::<u32>()).transpose()?;
            let counts = counts(host(OP, &experts)?.slice()?, of_tokens, experts.dims()[1], shape);
            Tensor::from_vec(counts, &shape, experts.device())
        },
        cuda => cuda::counts(&experts, of_tokens.as_ref(), shape),
    })
}

/// Fails unless the sequences are u32 [t].
pub(in crate::moe) fn check_sequences(op: &str, of_tokens: Option<&Tensor>, n_tokens: usize) -> Result<()> {
    match of_tokens {
        Some(x) if x.dtype() != DType::U32 || x.dims() != [n_tokens] => {
            bail!("{op}: want u32 sequences [{n_tokens}], got {:?} {:?}", x.dtype(), x.dims())
        }
        _ => Ok(()),
    }
}

fn counts(experts: &[u32], of_tokens: Option<&[u32]>, top_k: usize, [s, e]: [usize; 2]) -> Vec<f32> {
    let mut counts = vec![0.0; s * e];
    for (token, experts) in experts.chunks_exact(top_k).enumerate() {
        let sequence = of_tokens.map_or(0, |of_tokens| of_tokens[token] as usize);
        let of_sequence = &mut counts[sequence * e..(sequence + 1) * e];
        experts.iter().filter(|expert| (**expert as usize) < e).for_each(|expert| of_sequence[*expert as usize] += 1.0);
    }
    counts
}
