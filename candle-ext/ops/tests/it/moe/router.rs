use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    GroupLimit, OutputsToSave, RouterSpec, Routing, ScoreFunction, Tape, TopKOrder, add, auxiliary_loss, reshape,
    route, route_to, save_outputs, scale,
};

use super::{devices, statistics, to_u32s, u32s};
use crate::cases::{assert_close, assert_error, bits, check_each, randn, relative_error, tape, values};

pub(crate) const SPEC: RouterSpec = RouterSpec {
    top_k: 3,
    score: ScoreFunction::Softmax,
    order: TopKOrder::TopKFirst,
    normalize: false,
    groups: None,
    scaling: 1.0,
};

/// Returns settings with every score function, order and choice of groups.
pub(crate) fn specs() -> Vec<RouterSpec> {
    let groups = Some(GroupLimit { n_groups: 4, n_selected: 2, n_scores_per_group: 2 });
    let mut all = Vec::new();
    for score in [ScoreFunction::Softmax, ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus] {
        for order in [TopKOrder::ScoreFirst, TopKOrder::TopKFirst] {
            for (normalize, groups, top_k) in [(false, None, 3), (true, None, 4), (true, groups, 4), (true, None, 1)] {
                all.push(RouterSpec { top_k, score, order, normalize, groups, scaling: 1.7 });
            }
        }
    }
    all.push(RouterSpec { top_k: 16, ..SPEC });
    all
}

/// Routes one token by full sorts. Returns the chosen experts and their weights.
fn naive(logits: &[f64], bias: &[f64], spec: &RouterSpec, chosen: Option<&[usize]>) -> (Vec<usize>, Vec<f64>) {
    let score = |logits: &[f64]| -> Vec<f64> {
        let exps = logits.iter().map(|x| x.exp());
        match spec.score {
            ScoreFunction::Softmax => exps.clone().map(|e| e / exps.clone().sum::<f64>()).collect(),
            ScoreFunction::Sigmoid => exps.map(|e| e / (1.0 + e)).collect(),
            ScoreFunction::SqrtSoftplus => exps.map(|e| (1.0 + e).ln().sqrt()).collect(),
        }
    };
    let ranked = |scores: &[f64]| {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        order
    };
    let first = spec.order == TopKOrder::TopKFirst && spec.score == ScoreFunction::Softmax;
    let mut selection = if first { logits.to_vec() } else { score(logits) };
    selection.iter_mut().zip(bias).for_each(|(s, b)| *s += b);
    if let Some(limit) = spec.groups {
        let size = logits.len() / limit.n_groups;
        let sum = |group: &[f64]| ranked(group)[..limit.n_scores_per_group].iter().map(|i| group[*i]).sum::<f64>();
        let sums: Vec<f64> = selection.chunks(size).map(sum).collect();
        for group in &ranked(&sums)[limit.n_selected..] {
            selection[group * size..(group + 1) * size].fill(f64::NEG_INFINITY);
        }
    }
    let experts = chosen.map_or_else(|| ranked(&selection)[..spec.top_k].to_vec(), <[usize]>::to_vec);
    let at = |values: &[f64]| experts.iter().map(|i| values[*i]).collect::<Vec<f64>>();
    let mut weights = if first { score(&at(logits)) } else { at(&score(logits)) };
    let sum: f64 = if spec.normalize { weights.iter().sum() } else { 1.0 };
    weights.iter_mut().for_each(|w| *w *= spec.scaling / sum);
    (experts, weights)
}

fn logits_and_bias(t: usize, e: usize) -> (Tensor, Tensor) {
    ((randn((t, e), 1) * 2.0).unwrap(), (randn(e, 2) * 0.3).unwrap())
}

#[test]
fn experts_weights_and_gradients_equal_the_reference() {
    let (t, e, h) = (70, 16, 1e-5);
    let (logits, bias) = logits_and_bias(t, e);
    let (of_logits, of_bias) = (values(&logits), values(&bias));
    check_each(specs(), |spec| {
        let upstream = randn((t, spec.top_k), 3);
        let mut experts = Vec::new();
        let (mut weights, mut grads) = (Vec::new(), Vec::new());
        for (row, upstream) in of_logits.chunks(e).zip(values(&upstream).chunks(spec.top_k)) {
            let (chosen, of_row) = naive(row, &of_bias, &spec, None);
            grads.extend((0..e).map(|i| {
                let moved = |step: f64| {
                    let mut row = row.to_vec();
                    row[i] += step;
                    let (_, weights) = naive(&row, &of_bias, &spec, Some(&chosen));
                    weights.iter().zip(upstream).map(|(w, d)| w * d).sum::<f64>()
                };
                (moved(h) - moved(-h)) / (2.0 * h)
            }));
            experts.extend(chosen.iter().map(|i| *i as u32));
            weights.extend(of_row);
        }
        let want = Tensor::from_vec(weights, (t, spec.top_k), &Device::Cpu).unwrap();
        let want_grads = Tensor::from_vec(grads, (t, e), &Device::Cpu).unwrap();
        for (test_device, dtype) in devices().iter().flat_map(|d| [DType::F32, DType::F64].map(|t| (d, t))) {
            let what = format!("{spec:?} {test_device:?} {dtype:?}");
            let logits = test_device.put(&logits.to_dtype(dtype).unwrap());
            let bias = test_device.put(&bias);
            test_device.run(|| {
                let mut assignment = None;
                let tape = tape(std::slice::from_ref(&logits), || {
                    let routing = route(&logits, Some(&bias), spec)?;
                    assignment = Some(routing.assignment);
                    Ok(routing.weights)
                });
                assert_eq!(to_u32s(&assignment.unwrap().experts), experts, "{what}");
                assert_close(&what, tape.output(), &want, 1e-6);
                let grad = tape.backward(&test_device.put(&upstream)).unwrap().remove(&logits).unwrap();
                assert_eq!(grad.dtype(), dtype);
                // A weight of one expert, normalized, is constant.
                let error = relative_error(&grad, &want_grads, 0.01);
                assert!(error < 2e-6, "{what}: gradient off by {error:.2e}");
            });
        }
    });
}

/// Compares the weights of given experts with the reference, and their gradients with finite differences.
#[test]
fn given_experts_have_the_weights_and_gradients_of_the_reference() {
    let (t, e, h) = (70, 16, 1e-5);
    let (logits, _) = logits_and_bias(t, e);
    let of_logits = values(&logits);
    check_each(specs(), |spec| {
        let k = spec.top_k;
        // 5 and 16 have no common factor, so that the experts of a token are different.
        let chosen = |token: usize| (0..k).map(|j| (token * 7 + j * 5) % e).collect::<Vec<usize>>();
        let upstream = randn((t, k), 3);
        let (mut weights, mut grads) = (Vec::new(), Vec::new());
        for (token, (row, upstream)) in of_logits.chunks(e).zip(values(&upstream).chunks(k)).enumerate() {
            let weights_of = |row: &[f64]| naive(row, &[0.0; 16], &spec, Some(&chosen(token))).1;
            grads.extend((0..e).map(|i| {
                let moved = |step: f64| {
                    let mut row = row.to_vec();
                    row[i] += step;
                    weights_of(&row).iter().zip(upstream).map(|(w, d)| w * d).sum::<f64>()
                };
                (moved(h) - moved(-h)) / (2.0 * h)
            }));
            weights.extend(weights_of(row));
        }
        let experts: Vec<u32> = (0..t).flat_map(chosen).map(|expert| expert as u32).collect();
        let given = Tensor::from_vec(experts.clone(), (t, k), &Device::Cpu).unwrap();
        let want = Tensor::from_vec(weights, (t, k), &Device::Cpu).unwrap();
        let want_grads = Tensor::from_vec(grads, (t, e), &Device::Cpu).unwrap();
        for (test_device, dtype) in devices().iter().flat_map(|d| [DType::F32, DType::F64].map(|t| (d, t))) {
            let what = format!("{spec:?} {test_device:?} {dtype:?}");
            let (logits, given) = (test_device.put(&logits.to_dtype(dtype).unwrap()), test_device.put(&given));
            test_device.run(|| {
                let mut assignment = None;
                let tape = tape(std::slice::from_ref(&logits), || {
                    let routing = route_to(&logits, &given, spec)?;
                    assignment = Some(routing.assignment);
                    Ok(routing.weights)
                });
                assert_eq!(to_u32s(&assignment.unwrap().experts), experts, "{what}");
                assert_close(&what, tape.output(), &want, 1e-6);
                let grad = tape.backward(&test_device.put(&upstream)).unwrap().remove(&logits).unwrap();
                let error = relative_error(&grad, &want_grads, 0.01);
                assert!(error < 2e-6, "{what}: gradient off by {error:.2e}");
            });
        }
    });
}

#[test]
fn experts_of_route_give_the_same_bits() {
    let (logits, bias) = logits_and_bias(33, 16);
    let upstream = |k| randn((33, k), 3);
    check_each(specs(), |spec| {
        for test_device in devices() {
            let (logits, bias) = (test_device.put(&logits), test_device.put(&bias));
            let upstream = test_device.put(&upstream(spec.top_k));
            test_device.run(|| {
                let selected = route(&logits, Some(&bias), spec).unwrap().assignment;
                let results = |routed: &dyn Fn() -> candle_core::Result<Routing>| {
                    let mut order = None;
                    let tape = tape(std::slice::from_ref(&logits), || {
                        let routing = routed()?;
                        order = Some(routing.assignment.order);
                        Ok(routing.weights)
                    });
                    let weights = bits(tape.output());
                    let grad = tape.backward(&upstream).unwrap().remove(&logits).unwrap();
                    (weights, bits(&grad), to_u32s(&order.unwrap()))
                };
                let given = results(&|| route_to(&logits, &selected.experts, spec));
                assert_eq!(given, results(&|| route(&logits, Some(&bias), spec)), "{spec:?}");
            });
        }
    });
}

#[test]
fn equal_scores_go_to_the_experts_in_order() {
    let logits = Tensor::zeros((2, 8), DType::F32, &Device::Cpu).unwrap();
    let groups = Some(GroupLimit { n_groups: 4, n_selected: 2, n_scores_per_group: 1 });
    for test_device in devices() {
        for groups in [None, groups] {
            let routing = test_device.run(|| route(&test_device.put(&logits), None, RouterSpec { groups, ..SPEC }));
            assert_eq!(to_u32s(&routing.unwrap().assignment.experts), [0, 1, 2, 0, 1, 2]);
        }
    }
}

/// Experts 0 and 2 have equal scores, and the group of expert 2 has the higher sum.
#[test]
fn equal_scores_of_two_groups_go_to_the_experts_in_order() {
    let logits = Tensor::new(&[[1f32, 0.0, 1.0, 2.0, -9.0, -9.0]], &Device::Cpu).unwrap();
    let groups = Some(GroupLimit { n_groups: 3, n_selected: 2, n_scores_per_group: 2 });
    for test_device in devices() {
        let routing = test_device.run(|| route(&test_device.put(&logits), None, RouterSpec { groups, ..SPEC }));
        assert_eq!(to_u32s(&routing.unwrap().assignment.experts), [3, 0, 2]);
    }
}

#[test]
fn extreme_logits_give_finite_weights_and_gradients() {
    let logits = Tensor::new(&[[-1e4f32, 1e4, 0.0, 90.0], [-800.0, -900.0, -1000.0, -1e4]], &Device::Cpu).unwrap();
    for test_device in devices() {
        for score in [ScoreFunction::Softmax, ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus] {
            let logits = test_device.put(&logits);
            let grad = test_device.run(|| {
                let spec = RouterSpec { score, normalize: true, order: TopKOrder::ScoreFirst, ..SPEC };
                let tape = tape(std::slice::from_ref(&logits), || Ok(route(&logits, None, spec)?.weights));
                let y = tape.output().clone();
                assert!(values(&y).iter().all(|w| w.is_finite()), "{score:?}");
                tape.backward(&test_device.put(&randn((2, 3), 1))).unwrap().remove(&logits).unwrap()
            });
            assert!(values(&grad).iter().all(|d| d.is_finite()), "{score:?}");
        }
    }
}

#[test]
fn nan_logits_choose_distinct_experts() {
    let logits = Tensor::new(&[[f32::NAN; 5], [1.0, f32::NAN, 2.0, f32::NAN, f32::NAN]], &Device::Cpu).unwrap();
    for test_device in devices() {
        let routing = test_device.run(|| route(&test_device.put(&logits), None, SPEC)).unwrap();
        assert_eq!(to_u32s(&routing.assignment.experts), [0, 1, 2, 2, 0, 1]);
    }
}

/// A replayed forward whose logits round differently would choose other experts.
#[test]
fn the_second_forward_takes_the_experts_of_the_first() {
    let (first, second) = (randn((20, 8), 1), randn((20, 8), 2));
    for test_device in devices() {
        let (first, second) = (test_device.put(&first), test_device.put(&second));
        test_device.run(|| {
            let (routing, saved) = save_outputs(OutputsToSave::All, || route(&first, None, SPEC)).unwrap();
            let mut again: Option<Routing> = None;
            let tape = Tape::replay(saved, &[&second], || {
                let routing = route(&second, None, SPEC)?;
                let weights = routing.weights.clone();
                again = Some(routing);
                Ok(weights)
            })
            .unwrap();
            let again = again.unwrap();
            assert_eq!(to_u32s(&routing.assignment.experts), to_u32s(&again.assignment.experts));
            assert_eq!(bits(&routing.weights), bits(&again.weights));
            let dy = test_device.put(&randn((20, 3), 3));
            assert!(tape.backward(&dy).unwrap().get(&second).is_some());
        });
    }
}

#[test]
fn no_tokens_give_no_weights() {
    let routing = route(&randn((0, 8), 1), None, SPEC).unwrap();
    assert_eq!((routing.weights.dims(), routing.assignment.n_tokens()), (&[0, 3][..], 0));
    let none = Tensor::zeros((0, 3), DType::U32, &Device::Cpu).unwrap();
    assert_eq!(route_to(&randn((0, 8), 1), &none, SPEC).unwrap().weights.dims(), [0, 3]);
}

#[test]
fn wrong_settings_and_shapes_are_named() {
    let logits = randn((4, 8), 1);
    let with = |spec: RouterSpec| route(&logits, None, spec);
    let limit = |n_groups, n_selected, n_scores_per_group| RouterSpec {
        groups: Some(GroupLimit { n_groups, n_selected, n_scores_per_group }),
        ..SPEC
    };
    assert_error(with(RouterSpec { top_k: 9, ..SPEC }), "top_k must be 1 to 8, the number of experts, got 9");
    assert_error(with(RouterSpec { top_k: 0, ..SPEC }), "top_k must be 1 to 8");
    assert_error(with(limit(3, 1, 1)), "8 experts cannot be divided by 3 groups");
    assert_error(with(limit(4, 1, 1)), "1 of 4 groups of 2 experts cannot give 3 experts");
    assert_error(with(limit(4, 2, 3)), "n_scores_per_group must be 1 to 2");
    assert_error(route(&randn(4, 1), None, SPEC), "want f32 or f64 logits [t, e]");
    assert_error(route(&logits, Some(&randn(7, 1)), SPEC), "want an f32 bias [8], got F32 [7]");
    let given = |experts: &[u32]| {
        let experts = u32s(experts).reshape((experts.len() / 3, 3))?;
        route_to(&logits, &experts, SPEC)
    };
    assert_error(given(&[0, 1, 2]), "want u32 experts [4, 3], got U32 [1, 3]");
    assert_error(given(&[0, 1, 2, 5, 6, 7, 0, 8, 1, 0, 1, 2]), "token 2 has expert 8, but there are 8");
    assert_error(given(&[0, 1, 2, 5, 6, 5, 0, 3, 1, 0, 1, 2]), "token 1 has expert 5 twice");
    assert_error(route_to(&logits, &randn((4, 3), 1), SPEC), "want u32 experts [4, 3], got F32 [4, 3]");
}

/// Losses and weights of one router send their gradients to the same logits.
#[test]
fn gradients_of_weights_and_losses_add_up() {
    use candlewick_ops::router_z_loss;
    let logits = randn((5, 8), 1);
    let grad = |with_loss: bool, with_weights: bool| {
        let inputs = std::slice::from_ref(&logits);
        let tape = tape(inputs, || {
            if with_loss {
                let of_logits = statistics(&logits, ScoreFunction::Softmax)?;
                auxiliary_loss("z", &router_z_loss(&logits, &of_logits)?)?;
            }
            let weights = route(&logits, None, SPEC)?.weights;
            if with_weights { Ok(weights) } else { scale(&weights, 0.0, DType::F32) }
        });
        let weights = vec![Tensor::new(0.5f32, &Device::Cpu).unwrap(); usize::from(with_loss)];
        tape.backward_with_losses(&randn((5, 3), 2), &weights).unwrap().remove(&logits).unwrap()
    };
    let sum = add(&grad(true, false), &grad(false, true)).unwrap();
    assert_close("sum", &grad(true, true), &reshape(&sum, (5, 8)).unwrap(), 1e-6);
}
