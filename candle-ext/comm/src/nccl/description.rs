//! Dtype and shape of a tensor, encoded as words that are sent with it. The receiver compares them with its expectation.
//!
//! NCCL does not check matching sends and receives: on a mismatch it hangs, truncates or misinterprets the data.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};

use crate::arguments::MAX_DIMS;
use crate::element::DTYPES;

/// Number of words of a description: dtype, number of dims, dims and checksum.
pub(super) const WORDS: usize = 3 + MAX_DIMS;

/// Largest number of cached descriptions. Models send tensors of few shapes.
const MAX_CACHED: usize = 64;

type Words = [i64; WORDS];

/// Cache of descriptions on the device, of the tensors that this rank has sent.
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

/// Returns the buffer of a description to receive: zeros, which decode to `None`.
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

/// Decodes a dtype and shape. Returns `None` if some words have not arrived.
pub(super) fn decode(words: &[i64]) -> Option<(DType, Vec<usize>)> {
    let (last, words) = words.split_last()?;
    let dtype = *DTYPES.get(usize::try_from(words[0].checked_sub(1)?).ok()?)?;
    let dims = words[2..].get(..usize::try_from(words[1]).ok()?)?;
    let shape = dims.iter().map(|dim| usize::try_from(*dim).ok()).collect::<Option<_>>()?;
    (*last == checksum(words)).then_some((dtype, shape))
}

/// Returns the FNV-1a hash of words.
fn checksum(words: &[i64]) -> i64 {
    let hash = |hash: u64, word: &i64| (hash ^ *word as u64).wrapping_mul(0x0100_0000_01B3);
    words.iter().fold(0xCBF2_9CE4_8422_2325, hash) as i64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_decoded_description_equals_the_encoded_one() {
        for shape in [&[][..], &[0], &[3, 1 << 40], &[1; MAX_DIMS]] {
            for dtype in DTYPES {
                assert_eq!(decode(&encode(dtype, shape)), Some((dtype, shape.to_vec())));
            }
        }
    }

    #[test]
    fn an_incomplete_description_decodes_to_none() {
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
    fn the_cache_of_descriptions_is_bounded() {
        let mut cache = Descriptions::default();
        let x = |n: usize| Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap();
        let first = cache.of(&x(1)).unwrap();
        assert_eq!(cache.of(&x(1)).unwrap().id(), first.id());
        for n in 2..=MAX_CACHED + 1 {
            assert_eq!(decode(&cache.of(&x(n)).unwrap().to_vec1().unwrap()), Some((DType::F32, vec![n])));
        }
        assert!(cache.0.len() <= MAX_CACHED && cache.of(&x(1)).unwrap().id() != first.id());
    }
}
