use std::cell::{Cell, RefCell};
use std::rc::Rc;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{
    BackwardContext, GradSink, OutputDtype, Tape, Weight, add, linear, no_grad, record, record_exchange, requires_grad,
    reshape, rms_norm, scale,
};

use crate::cases::{
    OpCase, TestDevice, assert_close, assert_error, bits, bound, check_each, grad_of, identity_exchange, randn, tape,
    trainable,
};

fn tensor(values: &[f32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

fn numbers(x: Option<&Tensor>) -> Vec<f32> {
    x.unwrap().to_vec1().unwrap()
}

#[test]
fn each_of_four_inputs_gets_its_gradient() {
    let inputs = [1.0, 2.0, 3.0, 4.0].map(|x| tensor(&[x, 10.0 * x]));
    let tape = tape(&inputs, || {
        let back = |dy: &Tensor, _: &mut BackwardContext<'_>| {
            Ok([Some(dy.clone()), Some((dy * 2.0)?), None, Some((dy * 4.0)?)])
        };
        Ok(record("op", inputs.each_ref().map(Into::into), tensor(&[9.0, 12.0]), back))
    });
    assert_eq!(numbers(Some(tape.output())), [9.0, 12.0]);
    let grads = tape.backward(&tensor(&[1.0, 10.0])).unwrap();
    assert_eq!(numbers(grads.get(&inputs[0])), [1.0, 10.0]);
    assert_eq!(numbers(grads.get(&inputs[1])), [2.0, 20.0]);
    assert!(grads.get(&inputs[2]).is_none());
    assert_eq!(numbers(grads.get(&inputs[3])), [4.0, 40.0]);
}

#[test]
fn an_output_used_twice_runs_its_backward_once_with_the_sum() {
    let calls = Rc::new(Cell::new(0));
    let counted = calls.clone();
    let x = tensor(&[1.0]);
    let tape = tape(std::slice::from_ref(&x), || {
        let y = record("op", [(&x).into()], tensor(&[1.0]), move |dy, _| {
            counted.set(counted.get() + 1);
            Ok([Some(dy.clone())])
        });
        add(&y, &scale(&y, 4.0, DType::F32)?)
    });
    assert_eq!(numbers(tape.backward(&tensor(&[1.0])).unwrap().get(&x)), [5.0]);
    assert_eq!(calls.get(), 1);
}

/// Ops may add to the gradient accumulated for an input. The sum equals that of their separate gradients.
#[test]
fn the_gradient_of_a_shared_input_is_the_sum_over_its_ops() {
    for (test_device, (t, d)) in
        TestDevice::all().iter().flat_map(|test_device| [(70, 33), (40, 64), (5, 2560)].map(|dims| (test_device, dims)))
    {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let put = |x: &Tensor| test_device.put(&x.to_dtype(dtype).unwrap());
            let (x, dy) = (put(&randn((t, d), 1)), put(&randn((t, d), 2)));
            let (gain, w) = (trainable(&put(&randn(d, 3))), trainable(&put(&(randn((d, d), 4) / 8.0).unwrap())));
            let gradient = |op: &dyn Fn() -> Result<Tensor>| {
                test_device.run(|| tape(std::slice::from_ref(&x), op).backward(&dy).unwrap().remove(&x).unwrap())
            };
            let norm = || rms_norm(&x, &gain, 1e-5);
            let product = || linear(&x, &w, None, OutputDtype::SameAsInput);
            let all = gradient(&|| add(&add(&x, &norm()?)?, &add(&product()?, &add(&norm()?, &product()?)?)?));
            let [of_norm, of_product] = [gradient(&norm), gradient(&product)].map(|x| x.to_dtype(DType::F64).unwrap());
            let want = ((of_norm + of_product).unwrap() * 2.0).unwrap() + dy.to_dtype(DType::F64).unwrap();
            // Each part was rounded, and most of the partial sums.
            assert_close(&format!("{test_device:?} {dtype:?} {t} {d}"), &all, &want.unwrap(), 2.0 * bound(dtype));
        }
    }
}

/// Returns the gradient of y + 3 x, where y comes from an op of another tensor and of x, to whose gradient it adds.
fn accumulated_gradient(x: &Tensor, returns_sum: bool) -> Result<Tensor> {
    let other = tensor(&[0.0]);
    let tape = Tape::record(&[x, &other], || {
        let y = record("op", [(&other).into(), x.into()], tensor(&[1.0]), move |dy, context| {
            assert!(context.accumulated(1, DType::F32, &[2])?.is_none(), "another shape");
            assert!(context.accumulated(1, DType::BF16, &[1])?.is_none(), "another dtype");
            assert!(context.accumulated(0, DType::F32, &[1])?.is_none(), "no other op has read this input");
            assert!(context.accumulated(2, DType::F32, &[1])?.is_none(), "there is no such input");
            let sum = context.accumulated(1, DType::F32, &[1])?.unwrap();
            assert_eq!(numbers(Some(&sum)), [3.0]);
            let own = (dy * 10.0)?;
            Ok([None, if returns_sum { Some((own + sum)?) } else { None }])
        });
        add(&y, &scale(x, 3.0, DType::F32)?)
    });
    Ok(tape?.backward(&tensor(&[1.0]))?.remove(x).unwrap())
}

#[test]
fn an_op_may_add_to_the_accumulated_gradient_of_any_input() {
    assert_eq!(numbers(Some(&accumulated_gradient(&tensor(&[1.0]), true).unwrap())), [13.0]);
}

#[test]
fn an_accumulated_gradient_that_is_not_returned_is_an_error() {
    assert_error(accumulated_gradient(&tensor(&[1.0]), false), "op: backward took the gradient of input 1");
}

/// The op of the outer tape follows an exchange; that of the inner tape does not.
#[test]
fn a_tape_inside_anothers_backward_defers_by_itself() {
    let x = tensor(&[1.0]);
    let tape = Tape::record(&[&x], || {
        let y = identity_exchange(&x)?;
        Ok(record("outer", [(&y).into()], tensor(&[1.0]), |dy, context| {
            assert!(context.defers());
            let deferred = Rc::new(Cell::new(false));
            let ran = deferred.clone();
            context.defer(move || {
                ran.set(true);
                Ok(())
            })?;
            let (input, done) = (tensor(&[1.0]), Rc::new(Cell::new(false)));
            let seen = done.clone();
            let inner = Tape::record(&[&input], || {
                Ok(record("inner", [(&input).into()], tensor(&[1.0]), move |dy, context| {
                    assert!(!context.defers());
                    context.defer(move || {
                        seen.set(true);
                        Ok(())
                    })?;
                    Ok([Some(dy.clone())])
                }))
            })?;
            inner.backward(dy)?;
            assert!(done.get() && !deferred.get());
            Ok([Some(dy.clone())])
        }))
    });
    assert_eq!(numbers(tape.unwrap().backward(&x).unwrap().get(&x)), [1.0]);
}

/// Weight gradients wait until the exchange of the activation gradient is in flight; none is lost.
#[test]
fn weight_gradients_are_computed_while_their_inputs_gradient_is_exchanged() {
    let (x, w) = (randn((5, 3), 1), trainable(&randn((4, 3), 2)));
    let (during, before, after) = (Rc::new(Cell::new(false)), grad_of(&w), w.clone());
    let seen = during.clone();
    let forward = |x: &Tensor| x.affine(2.0, 0.0);
    let tape = Tape::record(&[&x], || {
        let y = record_exchange("exchange", &x, forward, move |dy| {
            assert_eq!(bits(&before), vec![0; 12], "nothing is added yet");
            let (sum, seen) = (dy.affine(2.0, 0.0)?, seen.clone());
            Ok(Box::new(move || {
                seen.set(bits(&grad_of(&after)) != vec![0; 12]);
                Ok(sum)
            }))
        })?;
        add(&linear(&y, &w, None, OutputDtype::SameAsInput)?, &linear(&y, &w, None, OutputDtype::SameAsInput)?)
    });
    let dy = randn((5, 4), 3);
    let dx = tape.unwrap().backward(&dy).unwrap().remove(&x).unwrap();
    assert!(during.get(), "the weight's gradient was there before the exchange ended");

    let plain = trainable(&w.value().unwrap());
    let tape = Tape::record(&[&x], || {
        let y = scale(&x, 2.0, DType::F32)?;
        add(&linear(&y, &plain, None, OutputDtype::SameAsInput)?, &linear(&y, &plain, None, OutputDtype::SameAsInput)?)
    });
    let want = tape.unwrap().backward(&dy).unwrap().remove(&x).unwrap();
    assert_eq!(bits(&dx), bits(&want));
    assert_eq!(bits(&grad_of(&w)), bits(&grad_of(&plain)));
}

/// An op that needs a gradient in flight waits for it. Those of the tape's inputs are received in the end.
#[test]
fn gradients_in_flight_are_received_when_they_are_needed() {
    let events = Rc::new(RefCell::new(Vec::new()));
    let noted = |name: &'static str, x: &Tensor, factor: f64| {
        let events = events.clone();
        record("op", [x.into()], x.affine(factor, 0.0).unwrap(), move |dy, _| {
            events.borrow_mut().push(name);
            Ok([Some(dy.affine(factor, 0.0)?)])
        })
    };
    let exchanged = |names: [&'static str; 2], x: &Tensor| {
        let events = events.clone();
        record("exchange", [x.into()], x.affine(1.0, 0.0).unwrap(), move |dy, context| {
            events.borrow_mut().push(names[0]);
            let dy = dy.clone();
            let wait = move || {
                events.borrow_mut().push(names[1]);
                Ok(dy)
            };
            context.receive_later(0, Box::new(wait))?;
            Ok([None])
        })
    };
    let x = tensor(&[1.0, 2.0]);
    let tape = Tape::record(&[&x], || {
        let sent = noted("before", &x, 2.0);
        let meanwhile = noted("meanwhile", &x, 3.0);
        let received = exchanged(["start", "wait"], &sent);
        let of_input = exchanged(["start of input", "wait of input"], &x);
        add(&add(&received, &meanwhile)?, &of_input)
    });
    let dx = tape.unwrap().backward(&tensor(&[1.0, 10.0])).unwrap().remove(&x);
    assert_eq!(*events.borrow(), ["start of input", "start", "meanwhile", "wait", "before", "wait of input"]);
    assert_eq!(numbers(dx.as_ref()), [6.0, 60.0]);
}

/// Covers an input that is also the output, and one that is unused.
#[test]
fn the_identity_passes_the_gradient_through() {
    let (x, unused) = (tensor(&[1.0]), tensor(&[2.0]));
    let tape = Tape::record(&[&x, &unused], || Ok(x.clone())).unwrap();
    assert!(tape.is_empty());
    let grads = tape.backward(&tensor(&[3.0])).unwrap();
    assert_eq!(numbers(grads.get(&x)), [3.0]);
    assert!(grads.get(&unused).is_none());
}

#[test]
fn untracked_inputs_save_nothing() {
    let saved = Rc::new(());
    let x = randn(2, 1);
    let op = || {
        let held = saved.clone();
        record("op", [(&x).into()], tensor(&[0.0]), move |_, _| {
            let _ = &held;
            Ok([None])
        })
    };
    op();
    tape(&[], || Ok(op()));
    tape(std::slice::from_ref(&x), || no_grad(|| Ok(op())));
    assert_eq!(Rc::strong_count(&saved), 1);
    let held = tape(std::slice::from_ref(&x), || Ok(op()));
    assert_eq!(Rc::strong_count(&saved), 2);
    drop(held);
    assert_eq!(Rc::strong_count(&saved), 1);
}

#[test]
fn saved_tensors_are_freed_before_the_next_op_runs_backward() {
    let saved = Rc::new(());
    let (held, seen) = (saved.clone(), saved.clone());
    let x = tensor(&[1.0]);
    let tape = tape(std::slice::from_ref(&x), || {
        let y = record("first", [(&x).into()], tensor(&[1.0]), move |dy, _| {
            assert_eq!(Rc::strong_count(&seen), 2, "this one's and the test's");
            Ok([Some(dy.clone())])
        });
        Ok(record("second", [(&y).into()], tensor(&[1.0]), move |dy, _| {
            let _ = &held;
            Ok([Some(dy.clone())])
        }))
    });
    tape.backward(&x).unwrap();
}

/// Tiles record tapes of their own while the whole is recorded, or while its backward runs.
#[test]
fn a_tape_within_another_is_its_own() {
    let (x, w) = (randn((3, 4), 1), trainable(&randn((2, 4), 2)));
    let outer = Tape::record(&[&x], || {
        let inner = Tape::record(&[&x], || linear(&x, &w, None, OutputDtype::SameAsInput))?;
        assert!(!requires_grad(inner.output()) && !inner.is_empty());
        Ok(inner.output().clone())
    });
    assert!(outer.unwrap().is_empty());
}

#[test]
fn a_failed_or_panicked_forward_leaves_no_recording() {
    let x = tensor(&[1.0]);
    let failed: Result<Tape> = Tape::record(&[&x], || candle_core::bail!("the wire was cut"));
    assert_error(failed, "the wire was cut");
    std::panic::catch_unwind(|| drop(Tape::record(&[&tensor(&[1.0])], || panic!("on purpose")))).unwrap_err();
    assert!(!requires_grad(&x));
}

#[test]
fn an_error_in_backward_is_the_error_of_backward() {
    let x = tensor(&[1.0]);
    let fail = |_: &Tensor, _: &mut BackwardContext<'_>| -> Result<[Option<Tensor>; 1]> {
        candle_core::bail!("the wire was cut")
    };
    let tape = tape(std::slice::from_ref(&x), || Ok(record("op", [(&x).into()], tensor(&[1.0]), fail)));
    assert_error(tape.backward(&x), "the wire was cut");
}

#[test]
fn a_gradient_of_another_shape_or_dtype_is_refused() {
    let of = |dy: &Tensor| tape(&[], || Ok(tensor(&[1.0, 2.0]))).backward(dy);
    assert_error(of(&randn(3, 1)), "the gradient has shape [3]");
    assert_error(of(&randn(2, 1).to_dtype(DType::BF16).unwrap()), "BF16");
}

#[test]
fn a_weight_used_twice_gets_both_gradients() {
    let (x, w) = (randn((5, 3), 1), trainable(&randn((3, 3), 2)));
    let once = || linear(&x, &w, None, OutputDtype::SameAsInput);
    let dy = randn((5, 3), 3);
    tape(&[], || add(&once()?, &once()?)).backward(&dy).unwrap();
    let alone = trainable(&w.value().unwrap());
    tape(&[], || linear(&x, &alone, None, OutputDtype::SameAsInput)).backward(&dy).unwrap();
    assert_eq!(bits(&grad_of(&w)), bits(&(grad_of(&alone) * 2.0).unwrap()));
}

#[test]
fn add_scale_and_reshape_equal_candles() {
    check_each(
        [
            (
                "add",
                (|x| add(&x[0], &x[1])) as fn(&[Tensor]) -> Result<Tensor>,
                (|x| &x[0] + &x[1]) as fn(&[Tensor]) -> Result<Tensor>,
            ),
            ("scale", |x| add(&scale(&x[0], 0.3, x[0].dtype())?, &x[1]), |x| (&x[0] * 0.3)? + &x[1]),
            ("reshape", |x| reshape(&add(&x[0], &x[1])?, (34, 50)), |x| (&x[0] + &x[1])?.reshape((34, 50))),
        ],
        |(name, op, reference)| {
            OpCase {
                name,
                inputs: vec![randn((17, 100), 1), randn((17, 100), 2)],
                weights: vec![],
                op: &|x, _| op(x),
                reference: &|x| reference(x),
            }
            .check_all_formats();
        },
    );
}

#[test]
fn sums_of_different_shapes_or_dtypes_are_refused() {
    let x = randn((2, 3), 1);
    assert_error(add(&x, &randn((3, 2), 1)), "one is F32 [2, 3], the other F32 [3, 2]");
    assert_error(add(&x.to_dtype(DType::BF16).unwrap(), &x), "one is BF16 [2, 3], the other F32 [2, 3]");
}

#[test]
fn a_sink_must_be_a_contiguous_view() {
    assert_error(GradSink::new(randn((2, 3), 1).t().unwrap()), "want a contiguous f32 or bf16 view");
    let half = randn(2, 1).to_dtype(DType::F16).unwrap();
    assert_error(GradSink::new(half), "want a contiguous f32 or bf16 view, got F16");
}

#[test]
fn a_frozen_weight_alone_is_not_recorded() {
    let w = Weight::frozen(randn((2, 4), 2));
    assert!(tape(&[], || linear(&randn((3, 4), 1), &w, None, OutputDtype::SameAsInput)).is_empty());
}
