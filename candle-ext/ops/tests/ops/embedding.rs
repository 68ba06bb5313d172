use candle_core::{DType, Device, Tensor};
use candlewick_ops::{Weight, embedding};

use crate::cases::{Case, assert_error, backward, bits, grad_of, randn, trainable};

fn ids(ids: &[u32]) -> Tensor {
    Tensor::new(ids, &Device::Cpu).unwrap()
}

#[test]
fn it_equals_the_reference() {
    let many: Vec<u32> = (0..700).map(|i| i * i % 601).collect();
    for (v, d, ids) in [
        (601, 5, ids(&many)),
        (4, 3, ids(&[3, 3, 3, 0])),
        (1, 1, ids(&[0])),
        (10, 8, ids(&[1, 9, 9, 0, 2, 1]).reshape((2, 3)).unwrap()),
    ] {
        let lookup = ids.flatten_all().unwrap();
        let shape = [ids.dims(), &[d]].concat();
        Case {
            name: "embedding",
            inputs: vec![],
            weights: vec![randn((v, d), 1)],
            op: &|_, w| embedding(&ids, &w[0]),
            reference: &|a| a[0].index_select(&lookup, 0)?.reshape(shape.as_slice()),
        }
        .check_all_formats();
    }
}

#[test]
fn sixteen_bit_tables_get_an_f32_sum() {
    let w = trainable(&randn((2, 1), 1).to_dtype(DType::BF16).unwrap());
    let y = embedding(&ids(&[1; 600]), &w).unwrap();
    backward(&y, &y.ones_like().unwrap());
    assert_eq!(grad_of(&w).flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0.0, 600.0]);
}

#[test]
fn no_ids_give_no_rows() {
    let w = trainable(&randn((4, 3), 1));
    let none = Tensor::zeros(0, DType::U32, &Device::Cpu).unwrap();
    let y = embedding(&none, &w).unwrap();
    assert_eq!(y.dims(), [0, 3]);
    backward(&y, &y.zeros_like().unwrap());
    assert_eq!(bits(grad_of(&w)), [0; 12]);
}

#[test]
fn wrong_ids_are_named() {
    let w = Weight::frozen(randn((4, 3), 1));
    assert_error(embedding(&ids(&[0, 3, 4]), &w), "id 4 at position 2 is not in the table of 4 rows");
    let signed = Tensor::new(&[0i64], &Device::Cpu).unwrap();
    assert_error(embedding(&signed, &w), "ids are I64, want u32");
    assert_error(embedding(&ids(&[0]), &Weight::frozen(randn(4, 1))), "want a table [v, d]");
}
