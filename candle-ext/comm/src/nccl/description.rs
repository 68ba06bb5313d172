//! The dtype and shape of a tensor in words that travel with it, so that its receiver compares them with what it expects.
//!
//! NCCL itself sends bytes: of what does not fit it says nothing, waits for ever, or delivers a part.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};

use crate::arguments::MAX_DIMS;
use crate::element::DTYPES;

/// The number of words of a description: the dtype, the number of dims, the dims, and a checksum.
pub(super) const WORDS: usize = 3 + MAX_DIMS;

/// The descriptions that are kept on the device: models send tensors of few shapes.
const MAX_CACHED: usize = 64;

type Words = [i64; WORDS];

/// The descriptions of what this rank has sent, on the device.
#[derive(Default)]
pub(super) struct Descriptions(HashMap<Words, Tensor>);

impl Descriptions {
    /// Returns the description of `x` on the device of `x`.
    pub(super) fn of(&mut self, x: &Tensor) -> Result<Tensor> {
        let words = encode(x.dtype(), x.dims());
        if let Some(known) = self.0.get(&words) {
            return Ok(known.clone());
        }
        if self.0.len() == MAX_CACHED {
            self.0.clear();
        }
        let made = Tensor::new(&words, x.device())?;
        self.0.insert(words, made.clone());
        Ok(made)
    }
}

/// Returns where a description arrives: zeros, which describe nothing.
pub(super) fn empty(device: &Device) -> Result<Tensor> {
    Tensor::zeros(WORDS, DType::I64, device)
}

fn encode(dtype: DType, shape: &[usize]) -> Words {
    let mut words = [0; WORDS];
    words[0] = DTYPES.iter().position(|known| *known == dtype).map_or(0, |at| at as i64 + 1);
    words[1] = shape.len() as i64;
    words[2..].iter_mut().zip(shape).for_each(|(word, dim)| *word = *dim as i64);
    words[WORDS - 1] = checksum(&words[..WORDS - 1]);
    words
}

/// Returns the dtype and shape that `words` describe; `None` if not all of them have arrived.
pub(super) fn decode(words: &[i64]) -> Option<(DType, Vec<usize>)> {
    let (last, words) = words.split_last()?;
    let dtype = *DTYPES.get(usize::try_from(words[0].checked_sub(1)?).ok()?)?;
    let dims = words[2..].get(..usize::try_from(words[1]).ok()?)?;
    let shape = dims.iter().map(|dim| usize::try_from(*dim).ok()).collect::<Option<_>>()?;
    (*last == checksum(words)).then_some((dtype, shape))
}

/// FNV-1a over words.
fn checksum(words: &[i64]) -> i64 {
    let hash = |hash: u64, word: &i64| (hash ^ *word as u64).wrapping_mul(0x0100_0000_01B3);
    words.iter().fold(0xCBF2_9CE4_8422_2325, hash) as i64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_description_survives_the_way() {
        for shape in [&[][..], &[0], &[3, 1 << 40], &[1; MAX_DIMS]] {
            for dtype in DTYPES {
                assert_eq!(decode(&encode(dtype, shape)), Some((dtype, shape.to_vec())));
            }
        }
    }

    #[test]
    fn a_part_of_a_description_describes_nothing() {
        let whole = encode(DType::F32, &[2, 3]);
        for missing in 0..4 {
            let mut part = whole;
            part[missing] = 0;
            assert_eq!(decode(&part), None);
        }
        assert_eq!(decode(&[0; WORDS]), None);
        assert_eq!(decode(&[-1; WORDS]), None);
    }

    #[test]
    fn descriptions_are_kept_up_to_a_bound() {
        let mut kept = Descriptions::default();
        let x = |n: usize| Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap();
        let first = kept.of(&x(1)).unwrap();
        assert_eq!(kept.of(&x(1)).unwrap().id(), first.id());
        for n in 2..=MAX_CACHED + 1 {
            assert_eq!(decode(&kept.of(&x(n)).unwrap().to_vec1().unwrap()), Some((DType::F32, vec![n])));
        }
        assert!(kept.0.len() <= MAX_CACHED && kept.of(&x(1)).unwrap().id() != first.id());
    }
}
