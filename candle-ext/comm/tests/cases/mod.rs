//! Cases that every backend must pass: each operation in each dtype equals candle's own arithmetic bitwise.
#![allow(clippy::unwrap_used)]

use std::hash::{DefaultHasher, Hash, Hasher};

use candle_core::{DType, Device, Tensor};
use candlewick_comm::{Collective, Recv, Reduce, Result};

pub(crate) const DTYPES: [DType; 7] =
    [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U8, DType::U32, DType::I64];

/// Runs every case in the group of all ranks. Returns a digest of the results that are equal on all ranks.
pub(crate) fn check(group: &dyn Collective) -> Result<u64> {
    let mut digest = DefaultHasher::new();
    for dtype in DTYPES {
        for shape in [&[][..], &[1], &[3], &[5, 3], &[0, 4], &[4, 0], &[2, 3, 4, 5]] {
            for op in [Reduce::Sum, Reduce::Max, Reduce::Min] {
                all_reduce(group, dtype, shape, op)?.hash(&mut digest);
            }
            if !shape.is_empty() {
                all_gather(group, dtype, shape)?;
            }
            for root in 0..group.size() {
                broadcast(group, dtype, shape, root)?;
            }
        }
        for n_rows in [0, 1, 3] {
            reduce_scatter(group, dtype, &[n_rows * group.size(), 2])?;
        }
        for salt in 0..3 {
            all_to_all(group, dtype, salt, 3)?;
        }
        ring(group, dtype)?;
    }
    large(group)?.hash(&mut digest);
    if group.size() <= 4 {
        for dtype in [DType::BF16, DType::I64] {
            several_chunks(group, dtype)?;
        }
    }
    pairs(group)?;
    strided(group)?;
    several_at_once(group)?;
    subgroups(group)?;
    group.barrier()?;
    Ok(digest.finish())
}

/// Returns the input of a rank: values of both signs and many magnitudes, so that a sum depends on its order.
pub(crate) fn input(rank: usize, dtype: DType, shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    let mut state = (rank as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ n as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 24) as f64
    };
    let draw = |_| {
        if dtype.is_float() {
            (next() - 0.5) * [0.01, 0.1, 1.0, 10.0, 100.0][(next() * 5.0) as usize]
        } else {
            (next() * 30.0).floor()
        }
    };
    Tensor::from_vec((0..n).map(draw).collect::<Vec<f64>>(), shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Returns the elements as bytes.
pub(crate) fn bits(x: &Tensor) -> Vec<u8> {
    let flat = x.flatten_all().unwrap();
    let wide = if flat.dtype().is_float() { flat.to_dtype(DType::F64) } else { flat.to_dtype(DType::I64) }.unwrap();
    if wide.dtype().is_float() {
        wide.to_vec1::<f64>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect()
    } else {
        wide.to_vec1::<i64>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect()
    }
}

#[track_caller]
pub(crate) fn same(got: &Tensor, want: &Tensor, what: &str) {
    assert_eq!((got.dtype(), got.dims()), (want.dtype(), want.dims()), "{what}");
    assert!(bits(got) == bits(want), "{what}: {:?} {:?} differs bitwise", want.dtype(), want.dims());
}

/// Reduces the ranks' tensors in rank order, bf16 and f16 in f32 with one rounding at the end.
fn combined(inputs: &[Tensor], op: Reduce) -> Tensor {
    let dtype = inputs[0].dtype();
    let wide = if matches!(dtype, DType::BF16 | DType::F16) { DType::F32 } else { dtype };
    let wide: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(wide).unwrap()).collect();
    let combine = |a: Tensor, b: &Tensor| match op {
        Reduce::Sum => (a + b).unwrap(),
        Reduce::Max => a.maximum(b).unwrap(),
        Reduce::Min => a.minimum(b).unwrap(),
    };
    wide[1..].iter().fold(wide[0].clone(), combine).to_dtype(dtype).unwrap()
}

fn inputs(group: &dyn Collective, dtype: DType, shape: &[usize]) -> Vec<Tensor> {
    (0..group.size()).map(|rank| input(rank, dtype, shape)).collect()
}

fn all_reduce(group: &dyn Collective, dtype: DType, shape: &[usize], op: Reduce) -> Result<Vec<u8>> {
    let inputs = inputs(group, dtype, shape);
    let got = group.all_reduce(&inputs[group.rank()], op)?;
    same(&got, &combined(&inputs, op), "all_reduce");
    Ok(bits(&got))
}

/// Reduces several chunks per rank, of which the last is shorter.
fn large(group: &dyn Collective) -> Result<Vec<u8>> {
    let n = group.size();
    if n > 4 {
        return Ok(vec![]);
    }
    let long = |rank: usize| {
        Tensor::arange(0f32, 290_001.0 * n as f32, &Device::Cpu)?.affine(0.37 * (rank + 1) as f64, 0.1)?.sin()
    };
    let inputs = (0..n).map(long).collect::<candle_core::Result<Vec<_>>>()?;
    let want = combined(&inputs, Reduce::Sum).to_vec1::<f32>()?;
    let x = &inputs[group.rank()];
    let got = group.all_reduce(x, Reduce::Sum)?.to_vec1::<f32>()?;
    assert!(got == want, "all_reduce of a large tensor");
    let share = group.reduce_scatter(x)?.to_vec1::<f32>()?;
    assert!(share == want[group.rank() * 290_001..][..290_001], "reduce_scatter of a large tensor");
    Ok(got.iter().flat_map(|x| x.to_le_bytes()).collect())
}

/// Runs the collectives on several chunks per rank, which exceed a socket's buffer.
fn several_chunks(group: &dyn Collective, dtype: DType) -> Result<()> {
    let shape = [150_001 * group.size()];
    all_reduce(group, dtype, &shape, Reduce::Sum)?;
    reduce_scatter(group, dtype, &shape)?;
    all_gather(group, dtype, &shape)?;
    broadcast(group, dtype, &shape, group.size() - 1)?;
    all_to_all(group, dtype, 1, 150_001)
}

fn all_gather(group: &dyn Collective, dtype: DType, shape: &[usize]) -> Result<()> {
    let inputs = inputs(group, dtype, shape);
    let got = group.all_gather(&inputs[group.rank()])?;
    same(&got, &rows(&inputs), "all_gather");
    Ok(())
}

fn reduce_scatter(group: &dyn Collective, dtype: DType, shape: &[usize]) -> Result<()> {
    let inputs = inputs(group, dtype, shape);
    let got = group.reduce_scatter(&inputs[group.rank()])?;
    let share = shape[0] / group.size();
    let want = combined(&inputs, Reduce::Sum).narrow(0, group.rank() * share, share)?;
    same(&got, &want, "reduce_scatter");
    Ok(())
}

fn all_to_all(group: &dyn Collective, dtype: DType, salt: usize, width: usize) -> Result<()> {
    let n = group.size();
    // Uneven counts, some of them zero. With salt 2 no rank sends to itself.
    let count = |from: usize, to: usize| if salt == 2 && from == to { 0 } else { (from * 2 + to * 3 + salt) % 4 };
    let sent: Vec<Vec<usize>> = (0..n).map(|from| (0..n).map(|to| count(from, to)).collect()).collect();
    let inputs: Vec<Tensor> = (0..n).map(|r| input(r, dtype, &[sent[r].iter().sum(), width])).collect();
    let me = group.rank();
    let received: Vec<usize> = (0..n).map(|from| sent[from][me]).collect();
    let got = group.all_to_all(&inputs[me], &sent[me], &received)?;
    let part = |from: usize| inputs[from].narrow(0, sent[from][..me].iter().sum(), sent[from][me]).unwrap();
    same(&got, &rows(&(0..n).map(part).collect::<Vec<_>>()), "all_to_all");
    Ok(())
}

fn broadcast(group: &dyn Collective, dtype: DType, shape: &[usize], root: usize) -> Result<()> {
    let got = group.broadcast(&input(group.rank(), dtype, shape), root)?;
    same(&got, &input(root, dtype, shape), "broadcast");
    Ok(())
}

fn ring(group: &dyn Collective, dtype: DType) -> Result<()> {
    let (me, n) = (group.rank(), group.size());
    if n == 1 {
        assert!(group.send_recv(None, None, None)?.is_none());
        return Ok(());
    }
    // The shape differs from rank to rank, and one is empty.
    let (next, last) = ((me + 1) % n, (me + n - 1) % n);
    let want = input(last, dtype, &[last, 2]);
    let got = group.send_recv(Some(&input(me, dtype, &[me, 2])), Some(next), Some(Recv::like(&want, last)))?;
    same(&got.unwrap(), &want, "send_recv around");
    Ok(())
}

fn pairs(group: &dyn Collective) -> Result<()> {
    let (me, n) = (group.rank(), group.size());
    if n < 2 || me > 1 {
        return Ok(());
    }
    // Both directions concurrently in different dtypes, larger than the buffers between the ranks. Then one direction.
    let large = |rank: usize| input(rank, [DType::F32, DType::BF16][rank], &[1 << 18]);
    let want = large(1 - me);
    let got = group.send_recv(Some(&large(me)), Some(1 - me), Some(Recv::like(&want, 1 - me)))?.unwrap();
    same(&got, &want, "send_recv between");
    let scalar = input(0, DType::F64, &[]);
    match me {
        0 => assert!(group.send_recv(Some(&scalar), Some(1), None)?.is_none()),
        _ => same(&group.send_recv(None, None, Some(Recv::like(&scalar, 0)))?.unwrap(), &scalar, "send_recv one way"),
    }
    Ok(())
}

fn strided(group: &dyn Collective) -> Result<()> {
    let view = |rank: usize| input(rank, DType::F32, &[6, 4]).t().unwrap().narrow(0, 1, 2).unwrap();
    let views: Vec<Tensor> = (0..group.size()).map(view).collect();
    same(&group.all_reduce(&views[group.rank()], Reduce::Sum)?, &combined(&views, Reduce::Sum), "all_reduce of a view");
    same(&group.all_gather(&views[group.rank()])?, &rows(&views), "all_gather of a view");
    // Contiguous with an offset into its storage.
    let parts: Vec<Tensor> =
        (0..group.size()).map(|rank| input(rank, DType::F32, &[6, 4]).narrow(0, 2, 3).unwrap()).collect();
    same(&group.all_reduce(&parts[group.rank()], Reduce::Sum)?, &combined(&parts, Reduce::Sum), "all_reduce of rows");
    Ok(())
}

fn several_at_once(group: &dyn Collective) -> Result<()> {
    let shapes = [[7], [100_000], [1]];
    let start = |shape: &[usize; 1]| group.start_all_reduce(&input(group.rank(), DType::F32, shape), Reduce::Sum);
    let mut started = shapes.iter().map(start).collect::<Result<Vec<_>>>()?;
    drop(started.remove(0));
    for (pending, shape) in started.into_iter().zip(&shapes[1..]).rev() {
        same(&pending.wait()?, &combined(&inputs(group, DType::F32, shape), Reduce::Sum), "all_reduce, overlapped");
    }
    Ok(())
}

fn subgroups(group: &dyn Collective) -> Result<()> {
    let (me, n) = (group.rank(), group.size());
    let backwards = group.split("backwards", &[(0..n).rev().collect()])?;
    assert_eq!((backwards.rank(), backwards.size()), (n - 1 - me, n));
    let order = backwards.all_gather(&Tensor::new(&[me as u32], &Device::Cpu)?)?.to_vec1::<u32>()?;
    assert_eq!(order, (0..n as u32).rev().collect::<Vec<_>>());

    let lists = [(0..n).step_by(2).collect::<Vec<_>>(), (1..n).step_by(2).collect()];
    let parity = group.split("parity", &lists)?;
    let list = &lists[me % 2];
    assert_eq!((list[parity.rank()], parity.size()), (me, list.len()));
    let inputs: Vec<Tensor> = list.iter().map(|rank| input(*rank, DType::F32, &[9])).collect();
    same(&parity.all_reduce(&inputs[parity.rank()], Reduce::Sum)?, &combined(&inputs, Reduce::Sum), "part of a group");

    // A subgroup of a subgroup: its lists name ranks of the subgroup.
    let halves = [(0..n / 2).collect::<Vec<_>>(), (n / 2..n).collect()].into_iter().filter(|half| !half.is_empty());
    let half = backwards.split("half", &halves.collect::<Vec<_>>())?;
    let order = half.all_gather(&Tensor::new(&[me as u32], &Device::Cpu)?)?.to_vec1::<u32>()?;
    assert!(order.len() == half.size() && order.windows(2).all(|pair| pair[0] == pair[1] + 1), "{order:?}");
    assert_eq!(order[half.rank()], me as u32);

    let alone = parity.split("alone", &(0..parity.size()).map(|rank| vec![rank]).collect::<Vec<_>>())?;
    assert_eq!((alone.rank(), alone.size()), (0, 1));
    crossed(group, &*backwards)
}

/// Starts operations of two groups in different orders on even and odd ranks, which requires that starts do not block.
fn crossed(a: &dyn Collective, b: &dyn Collective) -> Result<()> {
    let x = Tensor::new(&[a.rank() as f32], &Device::Cpu)?;
    let (first, second) = if a.rank().is_multiple_of(2) { (a, b) } else { (b, a) };
    let pending = first.start_all_reduce(&x, Reduce::Sum)?;
    let total = second.all_reduce(&x, Reduce::Sum)?;
    same(&pending.wait()?, &total, "two groups");
    Ok(())
}

fn rows(parts: &[Tensor]) -> Tensor {
    let full: Vec<&Tensor> = parts.iter().filter(|part| part.elem_count() > 0).collect();
    if full.is_empty() {
        let n_rows = parts.iter().map(|part| part.dims()[0]).sum::<usize>();
        return Tensor::zeros([&[n_rows], &parts[0].dims()[1..]].concat(), parts[0].dtype(), &Device::Cpu).unwrap();
    }
    Tensor::cat(&full, 0).unwrap().contiguous().unwrap()
}
