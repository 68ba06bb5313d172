//! CPython's `random.Random`: the Mersenne Twister MT19937, and what is drawn from it, number for number.

/// A generator of the state that CPython has after `random.seed(seed)`.
pub(crate) struct PythonRandom {
    state: [u32; N],
    next: usize,
}

const N: usize = 624;
const M: usize = 397;

impl PythonRandom {
    /// Seeds as `random.Random(seed)` does for an integer.
    pub(crate) fn new(seed: u64) -> Self {
        let key = if seed > u64::from(u32::MAX) { vec![seed as u32, (seed >> 32) as u32] } else { vec![seed as u32] };
        Self::from_key(&key)
    }

    /// Seeds with words of 32 bits, the lowest first.
    pub(crate) fn from_key(key: &[u32]) -> Self {
        let mut state = [0; N];
        state[0] = 19_650_218;
        for i in 1..N {
            state[i] = spread(state[i - 1], 1_812_433_253).wrapping_add(i as u32);
        }
        let (mut i, mut j) = (1, 0);
        for _ in 0..N.max(key.len()) {
            state[i] = (state[i] ^ spread(state[i - 1], 1_664_525)).wrapping_add(key[j]).wrapping_add(j as u32);
            (i, j) = (following(&mut state, i), (j + 1) % key.len());
        }
        for _ in 1..N {
            state[i] = (state[i] ^ spread(state[i - 1], 1_566_083_941)).wrapping_sub(i as u32);
            i = following(&mut state, i);
        }
        state[0] = 0x8000_0000;
        Self { state, next: N }
    }

    /// `random.random()`: a number in [0, 1) with 53 random bits.
    pub(crate) fn random(&mut self) -> f64 {
        let (a, b) = (self.word() >> 5, self.word() >> 6);
        (f64::from(a) * 67_108_864.0 + f64::from(b)) / 9_007_199_254_740_992.0
    }

    /// A number below `n`, which must not be 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        let n_bits = usize::BITS - n.leading_zeros();
        loop {
            let drawn = self.bits(n_bits);
            if drawn < n as u64 {
                return drawn as usize;
            }
        }
    }

    /// `random.sample(range(n), k)`; `None` if there are not as many.
    pub(crate) fn sample(&mut self, n: usize, k: usize) -> Option<Vec<usize>> {
        if k > n {
            return None;
        }
        Some(if n <= pool_limit(k) { self.sample_pool(n, k) } else { self.sample_set(n, k) })
    }

    /// `random.shuffle(items)`.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }

    /// One index of `random.choices(items, k=...)`, `n` being the number of items.
    pub(crate) fn choice(&mut self, n: usize) -> usize {
        (self.random() * n as f64) as usize
    }

    fn sample_pool(&mut self, n: usize, k: usize) -> Vec<usize> {
        let mut pool: Vec<usize> = (0..n).collect();
        // What is drawn is replaced by the last that is left, as in CPython.
        let draw = |i: usize| {
            let at = self.below(n - i);
            let last = pool[n - i - 1];
            std::mem::replace(&mut pool[at], last)
        };
        (0..k).map(draw).collect()
    }

    fn sample_set(&mut self, n: usize, k: usize) -> Vec<usize> {
        let mut drawn: Vec<usize> = Vec::with_capacity(k);
        while drawn.len() < k {
            let at = self.below(n);
            if !drawn.contains(&at) {
                drawn.push(at);
            }
        }
        drawn
    }

    /// `getrandbits` for up to 64 bits.
    fn bits(&mut self, n_bits: u32) -> u64 {
        match n_bits {
            0 => 0,
            1..=32 => u64::from(self.word() >> (32 - n_bits)),
            _ => {
                let low = u64::from(self.word());
                low | u64::from(self.word() >> (64 - n_bits)) << 32
            }
        }
    }

    fn word(&mut self) -> u32 {
        if self.next == N {
            self.refill();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn refill(&mut self) {
        for i in 0..N {
            let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7fff_ffff);
            let twist = if y & 1 == 0 { 0 } else { 0x9908_b0df };
            self.state[i] = self.state[(i + M) % N] ^ (y >> 1) ^ twist;
        }
        self.next = 0;
    }
}

fn spread(word: u32, factor: u32) -> u32 {
    (word ^ (word >> 30)).wrapping_mul(factor)
}

fn following(state: &mut [u32; N], i: usize) -> usize {
    if i + 1 < N {
        return i + 1;
    }
    state[0] = state[N - 1];
    1
}

/// Up to this population CPython draws from a list, above it into a set.
fn pool_limit(k: usize) -> usize {
    let mut limit = 21;
    if k > 5 {
        let mut power = 1;
        while power < k * 3 {
            power *= 4;
        }
        limit += power;
    }
    limit
}

#[cfg(test)]
mod tests {
    use super::*;

    // All numbers are what CPython 3.11 draws.
    #[test]
    fn numbers_are_those_of_cpython() {
        let mut random = PythonRandom::new(1234);
        assert_eq!([random.random(), random.random()], [0.9664535356921388, 0.4407325991753527]);
        assert_eq!(PythonRandom::new(1 << 40).random(), 0.1036394562812375);
        let mut random = PythonRandom::new(7);
        assert_eq!([random.bits(40), random.bits(40)], [1_040_772_936_760, 434_439_589_175]);
        let mut random = PythonRandom::new(0);
        let choices: Vec<usize> = (0..8).map(|_| random.choice(7)).collect();
        assert_eq!(choices, [5, 5, 2, 1, 3, 2, 5, 2]);
    }

    #[track_caller]
    fn sampled(n: usize, k: usize, want: &[usize]) {
        assert_eq!(PythonRandom::new(1234).sample(n, k).as_deref(), Some(want));
    }

    #[test]
    fn samples_are_those_of_cpython() {
        sampled(10, 3, &[7, 1, 0]);
        sampled(21, 5, &[14, 3, 0, 2, 1]);
        sampled(22, 5, &[14, 3, 0, 2, 18]);
        sampled(100, 5, &[99, 56, 14, 0, 11]);
        sampled(85, 6, &[56, 14, 0, 11, 74, 4]);
        sampled(86, 6, &[56, 14, 0, 11, 74, 4]);
        sampled(5, 5, &[3, 0, 4, 2, 1]);
        sampled(3, 0, &[]);
        assert_eq!(PythonRandom::new(1234).sample(2, 3), None);
    }

    #[test]
    fn a_shuffle_is_that_of_cpython() {
        let mut items: Vec<usize> = (0..10).collect();
        PythonRandom::new(42).shuffle(&mut items);
        assert_eq!(items, [7, 3, 2, 8, 5, 6, 9, 4, 0, 1]);
    }
}
