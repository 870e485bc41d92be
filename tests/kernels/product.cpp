// What test_product.py calls.

#include "product.h"

extern "C" {
int64_t lanes() { return SmallProduct<float>::kLanes; }
void product_float(float* out, const float* x, int tx, const float* y, int ty, int64_t r, int64_t c, int64_t k, float beta,
                   float alpha, int symmetric) {
  SmallProduct<float>::run(out, x, tx, y, ty, r, c, k, beta, alpha, symmetric);
}
void product_double(double* out, const double* x, int tx, const double* y, int ty, int64_t r, int64_t c, int64_t k, double beta,
                    double alpha, int symmetric) {
  SmallProduct<double>::run(out, x, tx, y, ty, r, c, k, beta, alpha, symmetric);
}
}
