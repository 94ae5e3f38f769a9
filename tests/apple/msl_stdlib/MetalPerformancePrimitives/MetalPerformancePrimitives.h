// MetalPerformancePrimitives.h: a header that kernels may include; its declarations are in metal_stdlib.
