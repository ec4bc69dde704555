// float32 hyper-connection kernels of the trainer, forward and backward, one thread.
// S is [n, h, c] with h = 4; every gradient is written, none is accumulated, except those of
// parameters shared by all tokens. fast_ops.py compiles it.
#include <cmath>
#include <cstring>

namespace {
constexpr int H = 4, M = H * (H + 2), L = 16;  // L tokens are worked on side by side
typedef float Lane[L];

inline void column_norm(Lane* a, float eps) {
  for (int k = 0; k < H; k++) {
    Lane s;
    for (int l = 0; l < L; l++) s[l] = a[k][l] + a[H + k][l] + a[2 * H + k][l] + a[3 * H + k][l] + eps;
    for (int l = 0; l < L; l++) s[l] = 1.0f / s[l];
    for (int j = 0; j < H; j++)
      for (int l = 0; l < L; l++) a[j * H + k][l] *= s[l];
  }
}
inline void row_norm(Lane* a, float eps) {
  for (int j = 0; j < H; j++) {
    Lane s;
    for (int l = 0; l < L; l++)
      s[l] = a[j * H][l] + a[j * H + 1][l] + a[j * H + 2][l] + a[j * H + 3][l] + eps;
    for (int l = 0; l < L; l++) s[l] = 1.0f / s[l];
    for (int k = 0; k < H; k++)
      for (int l = 0; l < L; l++) a[j * H + k][l] *= s[l];
  }
}
// y = x / (sum x + eps) over a group of H strided elements: g becomes the gradient of x.
inline void group_back(Lane* g, const Lane* y, const Lane* x, int first, int step, float eps) {
  Lane dot, inv;
  for (int l = 0; l < L; l++) dot[l] = 0, inv[l] = eps;
  for (int i = 0; i < H; i++)
    for (int l = 0; l < L; l++) {
      dot[l] += g[first + i * step][l] * y[first + i * step][l];
      inv[l] += x[first + i * step][l];
    }
  for (int l = 0; l < L; l++) inv[l] = 1.0f / inv[l];
  for (int i = 0; i < H; i++)
    for (int l = 0; l < L; l++) g[first + i * step][l] = (g[first + i * step][l] - dot[l]) * inv[l];
}
inline float sigmoid(float v) { return 1.0f / (1.0f + std::exp(-v)); }

inline int load(const float* m, const float* base, const float* scale, long n, long t0, Lane* v) {
  int live = n - t0 < L ? int(n - t0) : L;
  for (int l = 0; l < L; l++) {
    const float* row = m + (t0 + (l < live ? l : 0)) * M;
    for (int i = 0; i < M; i++)
      v[i][l] = row[i] * scale[i < H ? 0 : i < 2 * H ? 1 : 2] + base[i];
  }
  return live;
}
inline void softmax_rows(const Lane* v, Lane* a) {
  for (int j = 0; j < H; j++)
    for (int l = 0; l < L; l++) {
      float top = v[j * H][l], s = 0;
      for (int k = 1; k < H; k++) top = v[j * H + k][l] > top ? v[j * H + k][l] : top;
      for (int k = 0; k < H; k++) s += a[j * H + k][l] = std::exp(v[j * H + k][l] - top);
      for (int k = 0; k < H; k++) a[j * H + k][l] /= s;
    }
}
}  // namespace

extern "C" {

void hc_weights_forward(const float* m, const float* base, const float* scale, long n, int iters,
                        float eps, float* pre, float* post, float* comb) {
  for (long t0 = 0; t0 < n; t0 += L) {
    Lane v[M], a[H * H];
    int live = load(m, base, scale, n, t0, v);
    softmax_rows(v + 2 * H, a);
    for (int i = 0; i < H * H; i++)
      for (int l = 0; l < L; l++) a[i][l] += eps;
    column_norm(a, eps);
    for (int r = 1; r < iters; r++) row_norm(a, eps), column_norm(a, eps);
    for (int l = 0; l < live; l++) {
      for (int j = 0; j < H; j++) {
        pre[(t0 + l) * H + j] = sigmoid(v[j][l]) + eps;
        post[(t0 + l) * H + j] = 2 * sigmoid(v[H + j][l]);
      }
      for (int i = 0; i < H * H; i++) comb[(t0 + l) * H * H + i] = a[i][l];
    }
  }
}

// gm [n, 24]; gbase [24] and gscale [3] are added to.
void hc_weights_backward(const float* m, const float* base, const float* scale, long n, int iters,
                         float eps, const float* gpre, const float* gpost, const float* gcomb,
                         float* gm, float* gbase, float* gscale) {
  static thread_local Lane steps[128][H * H];
  for (long t0 = 0; t0 < n; t0 += L) {
    Lane v[M], soft[H * H], g[M];
    int live = load(m, base, scale, n, t0, v), s = 0;
    softmax_rows(v + 2 * H, soft);
    for (int i = 0; i < H * H; i++)
      for (int l = 0; l < L; l++) steps[0][i][l] = soft[i][l] + eps;
    for (int r = 0; r < 2 * iters - 1; r++) {  // column, row, column, ...
      std::memcpy(steps[s + 1], steps[s], sizeof(steps[0]));
      s++;
      if (r % 2 == 0) column_norm(steps[s], eps); else row_norm(steps[s], eps);
    }
    for (int i = 0; i < M; i++)
      for (int l = 0; l < L; l++) {
        long t = t0 + (l < live ? l : 0);
        g[i][l] = l >= live ? 0 : i < H ? gpre[t * H + i] : i < 2 * H ? gpost[t * H + i - H]
                                                            : gcomb[t * H * H + i - 2 * H];
      }
    Lane* ga = g + 2 * H;
    for (; s > 0; s--)
      for (int i = 0; i < H; i++)
        if (s % 2 == 1) group_back(ga, steps[s], steps[s - 1], i, H, eps);
        else group_back(ga, steps[s], steps[s - 1], i * H, 1, eps);
    for (int j = 0; j < H; j++)
      for (int l = 0; l < L; l++) {
        float dot = 0;
        for (int k = 0; k < H; k++) dot += ga[j * H + k][l] * soft[j * H + k][l];
        for (int k = 0; k < H; k++)
          ga[j * H + k][l] = (ga[j * H + k][l] - dot) * soft[j * H + k][l];
        float a = sigmoid(v[j][l]), b = sigmoid(v[H + j][l]);
        g[j][l] *= a * (1 - a);
        g[H + j][l] *= 2 * b * (1 - b);
      }
    for (int l = 0; l < live; l++)
      for (int i = 0; i < M; i++) {
        int part = i < H ? 0 : i < 2 * H ? 1 : 2;
        gm[(t0 + l) * M + i] = g[i][l] * scale[part];
        gbase[i] += g[i][l];
        gscale[part] += g[i][l] * m[(t0 + l) * M + i];
      }
  }
}

void hc_expand_forward(const float* y, const float* S, const float* post, const float* A, long n,
                       int c, float* out) {
  for (long t = 0; t < n; t++) {
    const float *s = S + t * H * c, *yt = y + t * c, *a = A + t * H * H;
    for (int k = 0; k < H; k++) {
      float p = post[t * H + k], a0 = a[k], a1 = a[H + k], a2 = a[2 * H + k], a3 = a[3 * H + k];
      float* o = out + (t * H + k) * c;
      for (int i = 0; i < c; i++)
        o[i] = p * yt[i] + a0 * s[i] + a1 * s[c + i] + a2 * s[2 * c + i] + a3 * s[3 * c + i];
    }
  }
}

void hc_expand_backward(const float* y, const float* S, const float* post, const float* A, long n,
                        int c, const float* g, float* gy, float* gS, float* gpost, float* gA) {
  for (long t = 0; t < n; t++) {
    const float *s = S + t * H * c, *yt = y + t * c, *a = A + t * H * H, *gt = g + t * H * c;
    float *gyt = gy + t * c, *gs = gS + t * H * c;
    const float* p = post + t * H;
    for (int i = 0; i < c; i++)
      gyt[i] = p[0] * gt[i] + p[1] * gt[c + i] + p[2] * gt[2 * c + i] + p[3] * gt[3 * c + i];
    for (int j = 0; j < H; j++) {
      float a0 = a[j * H], a1 = a[j * H + 1], a2 = a[j * H + 2], a3 = a[j * H + 3];
      float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
      for (int i = 0; i < c; i++) {
        float x = s[j * c + i];
        gs[j * c + i] = a0 * gt[i] + a1 * gt[c + i] + a2 * gt[2 * c + i] + a3 * gt[3 * c + i];
        d0 += x * gt[i], d1 += x * gt[c + i], d2 += x * gt[2 * c + i], d3 += x * gt[3 * c + i];
      }
      float* ga = gA + t * H * H + j * H;
      ga[0] = d0, ga[1] = d1, ga[2] = d2, ga[3] = d3;
    }
    float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
    for (int i = 0; i < c; i++) {
      float x = yt[i];
      d0 += x * gt[i], d1 += x * gt[c + i], d2 += x * gt[2 * c + i], d3 += x * gt[3 * c + i];
    }
    float* gp = gpost + t * H;
    gp[0] = d0, gp[1] = d1, gp[2] = d2, gp[3] = d3;
  }
}

// x = (sum_j p_j S_j) * inv * w; inv [n] is kept for the backward pass.
void hc_collapse_norm_forward(const float* S, const float* p, const float* w, long n, int c,
                              float eps, float* out, float* inv) {
  for (long t = 0; t < n; t++) {
    const float *s = S + t * H * c, *q = p + t * H;
    float* o = out + t * c;
    float sum = 0;
    for (int i = 0; i < c; i++) {
      float x = q[0] * s[i] + q[1] * s[c + i] + q[2] * s[2 * c + i] + q[3] * s[3 * c + i];
      o[i] = x;
      sum += x * x;
    }
    float r = inv[t] = 1.0f / std::sqrt(sum / c + eps);
    for (int i = 0; i < c; i++) o[i] *= r * w[i];
  }
}

// gS is written; gw [c] is added to.
void hc_collapse_norm_backward(const float* S, const float* p, const float* w, const float* inv,
                               long n, int c, const float* g, float* gS, float* gp, float* gw) {
  float x[4096], gx[4096];
  for (long t = 0; t < n; t++) {
    const float *s = S + t * H * c, *q = p + t * H, *gt = g + t * c;
    float r = inv[t], dot = 0;
    for (int i = 0; i < c; i++) {
      float v = q[0] * s[i] + q[1] * s[c + i] + q[2] * s[2 * c + i] + q[3] * s[3 * c + i];
      x[i] = v;
      gw[i] += gt[i] * v * r;
      gx[i] = gt[i] * w[i];
      dot += gx[i] * v;
    }
    float k = dot * r * r * r / c;
    float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
    for (int i = 0; i < c; i++) {
      float v = gx[i] * r - x[i] * k;
      gx[i] = v;
      d0 += v * s[i], d1 += v * s[c + i], d2 += v * s[2 * c + i], d3 += v * s[3 * c + i];
    }
    for (int j = 0; j < H; j++) {
      float* o = gS + (t * H + j) * c;
      for (int i = 0; i < c; i++) o[i] = q[j] * gx[i];
    }
    float* o = gp + t * H;
    o[0] = d0, o[1] = d1, o[2] = d2, o[3] = d3;
  }
}
}
