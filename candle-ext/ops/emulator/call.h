// Calls a kernel like a launch: reads each parameter, by its type, from eight bytes of its own.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// Same classes as in src/cuda/class.rs.
enum class Class { Pointer, Int32, Int64, Float32, Float64 };

template <typename P> constexpr Class emulated_class() {
    if (std::is_pointer<P>::value) return Class::Pointer;
    if (std::is_same<P, float>::value) return Class::Float32;
    if (std::is_same<P, double>::value) return Class::Float64;
    static_assert(std::is_pointer<P>::value || std::is_floating_point<P>::value || std::is_integral<P>::value,
                  "a parameter of a kernel is a pointer, an integer or a float");
    return sizeof(P) == 4 ? Class::Int32 : Class::Int64;
}

template <Class... C, typename... P> constexpr bool emulated_has_classes(void (*)(P...)) {
    if constexpr (sizeof...(C) == sizeof...(P)) return ((C == emulated_class<P>()) && ...);
    else return false;
}

template <typename P> P emulated_parameter(const uint64_t* bytes) {
    static_assert(sizeof(P) == 4 || sizeof(P) == 8, "a parameter of a kernel has four or eight bytes");
    P value;
    std::memcpy(&value, bytes, sizeof(P));
    return value;
}

template <typename... P, size_t... I>
void emulated_call(void (*kernel)(P...), const uint64_t* arguments, std::index_sequence<I...>) {
    kernel(emulated_parameter<P>(arguments + I)...);
}

template <typename... P> void emulated_call(void (*kernel)(P...), const uint64_t* arguments) {
    emulated_call(kernel, arguments, std::index_sequence_for<P...>{});
}

// Defines call_NAME(arguments). build.rs has read the classes from the source; the compiler checks them.
#define CALL(name, ...)                                                                                   \
    static_assert(emulated_has_classes<__VA_ARGS__>(name), "build.rs misreads the parameters of " #name); \
    extern "C" __attribute__((visibility("default"))) void call_##name(const uint64_t* arguments) {       \
        emulated_call(name, arguments);                                                                   \
    }
