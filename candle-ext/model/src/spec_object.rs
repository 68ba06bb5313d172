//! Clone and comparison of boxed specifications, whose types are known at run time.

/// Defines a trait `$object` that all types with `Clone` and `PartialEq` have which implement `$spec`. With it,
/// `Box<dyn $spec>` has both, too.
macro_rules! spec_object {
    ($object:ident, $spec:ident) => {
        #[doc = concat!("Clone and comparison of a [`", stringify!($spec), "`].")]
        pub trait $object: std::any::Any {
            /// Clones the specification.
            fn to_box(&self) -> Box<dyn $spec>;

            /// Returns true if both have one type and are equal.
            fn is_equal(&self, other: &dyn $spec) -> bool;
        }

        impl<S: $spec + Clone + PartialEq> $object for S {
            fn to_box(&self) -> Box<dyn $spec> {
                Box::new(self.clone())
            }

            fn is_equal(&self, other: &dyn $spec) -> bool {
                let other: &dyn std::any::Any = other;
                other.downcast_ref::<S>() == Some(self)
            }
        }

        impl Clone for Box<dyn $spec> {
            fn clone(&self) -> Self {
                (**self).to_box()
            }
        }

        // A derived `PartialEq` of a struct with a boxed trait object compares with a reference (rust-lang/rust#31740).
        impl PartialEq<&Self> for Box<dyn $spec> {
            fn eq(&self, other: &&Self) -> bool {
                (**self).is_equal(&***other)
            }
        }

        impl PartialEq for Box<dyn $spec> {
            fn eq(&self, other: &Self) -> bool {
                (**self).is_equal(&**other)
            }
        }
    };
}

pub(crate) use spec_object;
